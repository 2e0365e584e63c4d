"""Tests models of unusual structure, bits, scales or training: their files compute the same."""

from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes
from keras_qat.graph.read_model import read_model
from keras_qat.integer_graph.resolve import resolve, resolve_in_graph
from tests.comparison import assert_in_integers, export
from tests.end_to_end.exact import assert_agreement, inputs_of, model_of
from tests.helpers import images, keras, observe, rng, scramble
from tests.networks.small import functional, layers, residual_net

ROW = (6,)
READ_TOO = {
    "float": lambda x: [layers.LayerNormalization()(x), x],
    "transposed": lambda x: [layers.Conv2DTranspose(3, 3)(x), x],
    "elu": lambda x: [layers.ELU()(x), x],
}
"""Outputs that other layers also read."""
CONSTANTS = {
    "array": lambda x: x * np.float32([1, 2, 3]),
    "sum": lambda x: x + np.float32([1, 2, 3]),
    "tensor": lambda x: x * tf.constant([1.0, 2.0, 3.0]),
    "list": lambda x: tf.add(x, [1.0, 2.0, 3.0]),
}
WHOLE = {
    "clip": (lambda x: tf.clip_by_value(x, -1.0, 1.0), "int16x8"),
    "hard_swish": (lambda x: x * tf.nn.relu6(x + 3) / 6, "int16x8"),
    "gelu": (lambda x: layers.Activation("gelu")(layers.Dense(4)(x)), "int16x8"),
    "embedding": (lambda x: layers.Dense(3)(layers.Embedding(10, 4)(x)), "int16x8"),
    "lookup table": (layers.Activation("selu"), "int8"),
    "hard_sigmoid": (
        lambda x: layers.Concatenate()([layers.Activation("hard_sigmoid")(layers.Dense(4)(x)), x]),
        "int8",
    ),
    "relu6 of an embedding": (lambda x: layers.ReLU(6.0)(layers.Embedding(10, 4)(x)), "int8"),
}
"""Model and file computed clips differently, and the file did not name the layer."""
INT8 = ("hard_sigmoid", "relu6 of an embedding")
ACTIVATIONS = {
    **{name: layers.Activation(name) for name in ("sigmoid", "softmax", "tanh", "hard_sigmoid")},
    "leaky_relu": layers.LeakyReLU(),
    "vector": lambda x: x + np.float32([1, 2, -3, 0.5, 1]),
}
CASES = {
    **{
        f"outputs of {name}": ((6, 6, 4), lambda x, f=f: f(layers.ReLU()(x)), "int8")
        for name, f in READ_TOO.items()
    },
    **{
        f"a constant {name}": (ROW, lambda x, f=f: f(layers.Dense(3)(x)), "int8")
        for name, f in CONSTANTS.items()
    },
    **{name: (ROW, *row) for name, row in WHOLE.items()},
    **{
        f"{name} of {bits} bits": (
            ROW,
            lambda x, f=f: layers.Dense(3)(f(layers.Dense(5)(x))),
            recipes.int8(activation_bits=bits),
        )
        for bits in (2, 5)
        for name, f in ACTIVATIONS.items()
    },
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", CASES)
def test_unusual_models(kind, tmp_path):
    shape, build, recipe = CASES[kind]
    model = model_of(build, shape, "int32" if "embedding" in kind else "float32")
    assert kind not in INT8 or not keras_qat.plan(model).float_layers
    assert_agreement(model, inputs_of(model, 128), recipe, tmp_path)


def test_an_input_layer_called_as_a_layer(tmp_path):
    """Keras saves such a model, but cannot load it."""

    def build(x):
        x = layers.InputLayer((6,))(layers.Dense(6)(x))
        return [layers.Dense(3)(x), layers.InputLayer((6,))(inputs=x)]

    assert_agreement(model_of(build, (6,)), reloaded=tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "recipe",
    [
        recipes.contrib(),
        recipes.contrib().override("dense", quantize=False),
        recipes.int8().override("*", quantize=False),
    ],
    ids=["contrib", "contrib_overridden", "int8_overridden"],
)
def test_models_with_nothing_to_quantize(recipe):
    layer = layers.ReLU() if not recipe.overrides else layers.Dense(6, name="dense")
    model = model_of(layer, (6,))
    x = images(16, (6,))
    told = pytest.warns(match="quantizes nothing") if recipe.name == "contrib" else nullcontext()
    with told:
        qat = keras_qat.quantize_model(model, recipe)
    np.testing.assert_array_equal(qat.predict(x, verbose=0), model.predict(x, verbose=0))
    qat.compile("sgd", "mse")
    qat.fit(x, x, verbose=0)
    qat.evaluate(x, x, verbose=0)


def test_tensors_without_elements():
    """TFLite's converter crashed."""
    model = model_of(lambda x: layers.Concatenate()([layers.Dense(0)(x), x]), (6,))
    for verb in (keras_qat.plan, keras_qat.quantize_model):
        with pytest.raises(ValueError, match=r"tensors without elements.*: dense"):
            verb(model)


def test_equal_ranges_of_a_shared_layer_in_16_bits():
    """Model and file computed different scales if ranges of different calls were equal."""
    keras.utils.set_random_seed(3)
    inputs, shared = [keras.Input((6,)) for _ in range(2)], layers.Dense(32)
    model = keras.Model(inputs, [shared(array) for array in inputs])
    x = [images(512, (6,))] * 2
    qat = observe(keras_qat.quantize_model(model, "int16x8"), *x)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1
    calls = read_model(qat)
    for one, other in zip(resolve(qat).nodes, resolve_in_graph(calls, None).nodes, strict=True):
        if one.weights is not None:
            np.testing.assert_array_equal(one.weights.scale, other.weights.scale)


class OwnNormalization(layers.GroupNormalization):
    """A user's class for `register_op` with integers."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:These layers compute in float")
@pytest.mark.parametrize("kind", [layers.GroupNormalization, OwnNormalization])
def test_group_normalization_in_float_and_classes_that_inherit_it(kind):
    """TFLite broadcast Keras' computation incorrectly, and refused images with more axes."""
    for shape in ((4, 5, 8), (2, 2, 3, 8)):
        model = model_of(kind(2), shape)
        qat = observe(keras_qat.quantize_model(model, "int16x8"), inputs_of(model))
        contents = keras_qat.export_tflite(qat)
        assert keras_qat.verify(qat, contents, inputs_of(model)).max_difference <= 1


@pytest.mark.parametrize("shape", [(), (5,)])
def test_an_embedding_whose_input_length_is_another(shape, tmp_path):
    """Keras never compares `input_length` with the layer's input."""
    tokens = keras.Input(shape, dtype="int32")
    model = keras.Model(tokens, layers.Dense(2)(layers.Embedding(9, 4, input_length=1)(tokens)))
    assert_in_integers(model, rng(0).integers(0, 9, (8, *shape)), tmp_path)


PER_TENSOR = recipes.int8(per_channel=False)


def small_channel(size: float, **kwargs):
    """Returns a depthwise convolution with channel 1 folded to `size` times channel 0."""
    model = functional(
        (4, 4, 2),
        build=lambda x: layers.BatchNormalization(**kwargs)(
            layers.DepthwiseConv2D(3, use_bias=False)(x)
        ),
    )
    depthwise, norm = model.layers[1:]
    depthwise.depthwise_kernel.assign(np.ones((3, 3, 2, 1)))
    norm.moving_variance.assign([1.0, 1.0 / size**2])
    norm.moving_mean.assign([0.5, 0.25 / size])
    norm.beta.assign([0.25, 2.0])
    return model


@pytest.mark.parametrize("scale", [True, False])
def test_a_channel_too_small_for_the_scale_gives_its_offset(scale):
    """In training, model and file, it computes as if gamma were zero, but gamma still trains."""
    x = images(32, (4, 4, 2))
    result = export(small_channel(1 / 1000, scale=scale), x, recipe=PER_TENSOR)
    assert result.report.identical == 1
    qat = result.model
    for training in (True, False):
        np.testing.assert_allclose(qat(x, training=training)[..., 1], 2.0, atol=0.02)
        assert np.std(qat(x, training=training)[..., 0]) > 0.5
    if scale:
        gamma = qat.layers[-1].batch_norm.gamma
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(qat(x, training=True) ** 3)
        assert np.all(tape.gradient(loss, gamma).numpy() != 0)


def test_a_channel_of_few_codes_is_as_large_in_training_as_in_the_file():
    """The batch's statistics would hide that rounding increased the channel."""
    x = images(256, (4, 4, 2))
    model = small_channel(0.6 / 127)
    qat = keras_qat.quantize_model(model, PER_TENSOR)
    norm = qat.layers[-1].batch_norm
    z = model.layers[1](x).numpy()
    norm.moving_mean.assign(z.mean((0, 1, 2)))
    variance = z.var((0, 1, 2))
    norm.gamma.assign(np.sqrt(variance + norm.epsilon) * [1, 0.6 / 127])
    norm.moving_variance.assign(variance)
    qat(x, training=True)
    trained = np.asarray(qat(x, training=True))[..., 1].std()
    assert trained == pytest.approx(np.asarray(qat(x))[..., 1].std(), rel=0.05)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=0.02)


def test_delayed_quantization_computes_in_float():
    model, x = scramble(residual_net()), images(8, (8, 8, 1))
    qat = keras_qat.quantize_model(model, PER_TENSOR)
    keras_qat.set_quantization(qat, False)
    keras_qat.freeze_batch_norm(qat)
    np.testing.assert_allclose(qat(x, training=True), model(x), rtol=1e-4, atol=1e-4)


def test_ranges_of_weights_are_those_of_the_folded_kernel():
    model = small_channel(0.5)
    qat = observe(keras_qat.quantize_model(model, PER_TENSOR), images(8, (4, 4, 2)))
    (result,) = [quantizer for quantizer in keras_qat.quantizers(qat) if "kernel" in quantizer.name]
    assert result.maximum == pytest.approx(1 / np.sqrt(1.001), rel=1e-5)
