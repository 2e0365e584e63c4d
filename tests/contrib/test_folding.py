"""Tests folded and unfolded BatchNormalization against unfolded training and NumPy."""

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.layers import QuantizeWrapper
from tests.helpers import assert_all_close, images, keras, rng, save_and_load
from tests.networks.contrib import KERNELS, conv, image, layers, relu, single

contrib = keras_qat.recipes.contrib

BOTH = (False, True)
COMBINATIONS = list(itertools.product(KERNELS, ["relu", "relu6"], BOTH, BOTH, BOTH))


def with_statistics(model: Any, seed: int = 7) -> Any:
    """Gives BatchNormalizations the statistics and factors of a trained model."""
    numbers = rng(seed)
    for layer in model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            for weight in layer.weights:
                low, high = (-1, 1) if "mean" in weight.name or "beta" in weight.name else (0.5, 2)
                weight.assign(numbers.uniform(low, high, weight.shape))
    return model


def folded_and_float(model: Any, **options: Any) -> Any:
    quantized = keras_qat.quantize_model(model, contrib(**options))
    keras_qat.set_quantization(quantized, False)
    return quantized


def step(model: Any, x: np.ndarray) -> tuple[Any, Any, Any]:
    """Returns the output in training, and the gradients of its squares by input and weights."""
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
        loss = tf.reduce_mean(y**2)
    to_input, to_weights = tape.gradient(loss, [x, model.trainable_weights])
    return y, to_input, to_weights


def input_for(model: Any) -> np.ndarray:
    return images(16, model.input_shape[1:]) * 1.5 + 0.3


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "activation", "bypass", "scale", "identity_between"), COMBINATIONS
)
def test_folded_computes_what_unfolded_does(kind, activation, bypass, scale, identity_between):
    """Compares values and gradients in training, and values at inference."""
    model = with_statistics(
        single(
            kind,
            activation,
            bypass,
            batch_norm=True,
            scale=scale,
            identity_between=identity_between,
        )
    )
    folded = folded_and_float(model)
    assert not [layer for layer in folded.layers if isinstance(layer, layers.BatchNormalization)]
    x = input_for(model)
    np.testing.assert_allclose(folded(x), model(x), atol=2e-5)
    for actual, expected in zip(step(folded, x), step(model, x), strict=True):
        assert_all_close(tf.nest.flatten(actual), tf.nest.flatten(expected), rtol=1e-3, atol=2e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("center", [False, True])
def test_frozen_computes_with_moving_statistics(kind, center):
    """From `freeze_bn_delay` on, training computes like inference, and statistics stay the same."""
    model = with_statistics(single(kind, batch_norm=True, center=center, momentum=0.5))
    folded = folded_and_float(model, freeze_bn_delay=2)
    (wrapper,) = [layer for layer in folded.layers if isinstance(layer, QuantizeWrapper)]
    norm = wrapper.batch_norm
    x = input_for(model)

    np.testing.assert_allclose(folded(x, training=True), model(x, training=True), atol=2e-5)
    statistics = norm.moving_mean.numpy(), norm.moving_variance.numpy()
    for _ in range(2):
        y = folded(x, training=True)
        np.testing.assert_allclose(y, folded(x), atol=2e-5)
    np.testing.assert_array_equal(norm.moving_mean, statistics[0])
    np.testing.assert_array_equal(norm.moving_variance, statistics[1])

    gradients = dict(
        zip([weight.name for weight in folded.trainable_weights], step(folded, x)[2], strict=True)
    )
    for name, gradient in gradients.items():
        assert np.any(gradient.numpy() != 0), f"{name} goes on training"


def test_against_numpy():
    """Computes one 1x1 convolution with BatchNormalization by the formulas of the original."""
    inputs = image((5, 5, 3))
    y = layers.Conv2D(4, 1, use_bias=False, name="layer")(inputs)
    y = layers.BatchNormalization(momentum=0.9, epsilon=1e-2, name="bn")(y)
    model = with_statistics(keras.Model(inputs, y))
    x = images(8, (5, 5, 3))
    kernel = model.get_layer("layer").kernel.numpy().astype(np.float64)
    gamma, beta, mean, variance = (weight.numpy() for weight in model.get_layer("bn").weights)

    z = x.reshape(-1, 3) @ kernel[0, 0]
    deviation, moving_deviation = np.sqrt(z.var(0) + 1e-2), np.sqrt(variance + 1e-2)
    folded = kernel * gamma / moving_deviation
    low, high = min(folded.min(), 0), max(folded.max(), 0)
    scale = (high - low) / 254
    low = -round(-low / scale) * scale
    levels = np.clip(np.round((folded - low) / scale), 0, 254) * scale + low
    expected = x.reshape(-1, 3) @ levels[0, 0] * (moving_deviation / deviation)
    expected += beta - z.mean(0) * gamma / deviation

    quantized = keras_qat.quantize_model(model, "contrib")
    (wrapper,) = [layer for layer in quantized.layers if isinstance(layer, QuantizeWrapper)]
    result = []
    wrapper.output_quantizer = lambda x, *phase, **options: result.append(x) or x
    quantized(x, training=True)
    np.testing.assert_allclose(result[0].numpy().reshape(-1, 4), expected, atol=1e-4)

    new = wrapper.batch_norm
    np.testing.assert_allclose(new.moving_mean, 0.9 * mean + 0.1 * z.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        new.moving_variance, 0.9 * variance + 0.1 * z.var(0, ddof=1), rtol=1e-4, atol=1e-5
    )


def test_several_layers_in_nested_scopes():
    """Each BatchNormalization is folded into the convolution before it."""

    def block(name: str, inner: Any = None) -> Any:
        inputs = image()
        x = inner(inputs) if inner else inputs
        x = conv(x, "layer", use_bias=False)
        x = relu(layers.BatchNormalization(name="bn")(x))
        return keras.Model(inputs, x, name=name)

    inputs = image()
    y = block("outer", block("inner"))(inputs)
    y = layers.BatchNormalization(name="extra")(layers.MaxPooling2D()(y))
    model = with_statistics(keras.Model(inputs, y))
    reasons = {row.tensor: row.reason for row in keras_qat.plan(model, "contrib").rows if row.spec}
    assert reasons == {
        "outer/inner/layer/kernel": "kernel, folded with outer/inner/bn",
        "outer/inner/relu": "act_quant",
        "outer/layer/kernel": "kernel, folded with outer/bn",
        "outer/relu": "act_quant",
    }
    folded = folded_and_float(model)
    x = input_for(model)
    assert_all_close(step(folded, x)[:2], step(model, x)[:2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["conv", "depthwise"])
def test_unknown_height_and_width(kind):
    model = with_statistics(single(kind, batch_norm=True, shape=(None, None, 4)))
    folded = folded_and_float(model)
    for size in (5, 8):
        x = images(4, (size, size, 4))
        np.testing.assert_allclose(folded(x), model(x), atol=2e-5)
        np.testing.assert_allclose(folded(x, training=True), model(x, training=True), atol=2e-5)


def test_scope_does_not_hold_for_folding():
    """As in the original, a scope restricts quantizers, but not folding."""
    model = single("conv", batch_norm=True, scope="test")
    inputs = image()
    y = conv(model(inputs), "outside")
    model = keras.Model(inputs, y)
    plan = keras_qat.plan(model, "contrib", scope="outside")
    assert {row.tensor for row in plan.rows if row.spec} == {"outside/kernel", "outside"}
    quantized = keras_qat.quantize_model(model, "contrib", scope="outside")
    (folded,) = [layer for layer in quantized.layers if getattr(layer, "batch_norm", None)]
    assert folded.weight_quantizers == {}


@pytest.mark.parametrize("layer", [layers.Conv2D, layers.DepthwiseConv2D])
def test_dilation_that_needs_padding(layer):
    """The original included padding in the statistics, and could not fold such a Conv2D."""
    inputs = image((7, 7, 4))
    arguments = {"padding": "same", "dilation_rate": 2, "use_bias": False, "name": "layer"}
    y = layer(4, 3, **arguments) if layer is layers.Conv2D else layer(3, **arguments)
    y = relu(layers.BatchNormalization(name="bn")(y(inputs)))
    model = with_statistics(keras.Model(inputs, y))
    folded = folded_and_float(model)
    x = input_for(model)
    for training in (True, False):
        np.testing.assert_allclose(
            folded(x, training=training), model(x, training=training), atol=2e-5
        )
    (wrapper,) = [layer for layer in folded.layers if isinstance(layer, QuantizeWrapper)]
    norm = model.get_layer("bn")
    np.testing.assert_allclose(wrapper.batch_norm.moving_variance, norm.moving_variance, rtol=1e-4)
    np.testing.assert_allclose(
        wrapper.batch_norm.moving_mean, norm.moving_mean, rtol=1e-4, atol=1e-5
    )


@pytest.mark.legacy
def test_vectors_keep_the_variance_of_the_population(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, name="fc"),  # The original does not fold if there is a bias.
            keras.layers.BatchNormalization(momentum=0.9, name="bn"),
        ]
    )
    qat = keras_qat.quantize_model(model, "contrib")
    keras_qat.set_quantization(qat, False)
    x = np.random.default_rng(0).normal(size=(5, 6)).astype("float32")
    y = model.layers[0](x).numpy()
    output = qat(x, training=True)
    norm = qat.get_layer("quant_bn")
    np.testing.assert_allclose(norm.moving_mean, 0.1 * y.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, 0.9 + 0.1 * y.var(0, ddof=1), rtol=1e-5)
    normalized = (y - y.mean(0)) / np.sqrt(y.var(0) + 1e-3)
    np.testing.assert_allclose(output, normalized, rtol=1e-3, atol=1e-4)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), qat.predict(x, verbose=0))
