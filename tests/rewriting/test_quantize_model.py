"""Tests what `quantize_model` keeps of the float model, and what it does not change."""

import numpy as np
import pytest

import keras_qat
from tests.helpers import assert_all_equal, images, keras, observe, scramble, train, values
from tests.networks.small import layers, residual_net, tiny_net

pytestmark = pytest.mark.legacy

X = images(16, (8, 8, 1))


@pytest.fixture
def model():
    return scramble(residual_net())


@pytest.fixture
def qat(model):
    return keras_qat.quantize_model(model)


def test_float_model_is_untouched(model):
    before, output = values(model.weights), model.predict(X, verbose=0)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer = model.optimizer
    qat = keras_qat.quantize_model(model)
    train(qat, X)
    assert_all_equal(model.weights, before)
    np.testing.assert_array_equal(model.predict(X, verbose=0), output)
    assert model.optimizer is optimizer
    # It still trains separately.
    qat_before = qat.predict(X, verbose=0)
    model.fit(X, np.zeros(16), verbose=0)
    assert any(
        (weight.numpy() != value).any()
        for weight, value in zip(model.trainable_weights, before, strict=False)
    )
    np.testing.assert_array_equal(qat.predict(X, verbose=0), qat_before)


def test_names(model, qat):
    assert qat.name == model.name
    assert qat.input_names == ["image"]
    assert qat.output_names == ["logits"]
    names = {layer.name for layer in qat.layers}
    assert {"quant_stem", "quant_depthwise", "quant_merge", "quant_pool", "quant_logits"} <= names
    assert all(
        name.startswith("quant_") or name.startswith("image") or name.endswith("_quant")
        for name in names
    )


def test_before_any_data_only_the_weights_are_quantized(model, qat):
    """The float model with rounded kernels returns the same outputs."""
    rounded = keras.models.clone_model(model)
    rounded.set_weights(model.get_weights())
    for layer in rounded.layers:
        name = "depthwise_kernel" if "depthwise" in layer.name else "kernel"
        kernel = getattr(layer, name, None)
        if kernel is not None:
            value = kernel.numpy()
            axes = (0, 1) if name == "depthwise_kernel" else tuple(range(value.ndim - 1))
            scale = np.abs(value).max(axes, keepdims=True) / 127
            kernel.assign(np.round(value / scale) * scale)
    expected = rounded.predict(X, verbose=0)
    np.testing.assert_allclose(qat.predict(X, verbose=0), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - model.predict(X, verbose=0)).max() > 1e-4


def test_frozen_model_is_quantized_frozen():
    model = tiny_net()
    model.trainable = False
    assert keras_qat.quantize_model(model).trainable_weights == []


def test_quantizing_twice_keeps_trainable_flags():
    model = tiny_net()
    model.get_layer("conv").trainable = False
    qat = keras_qat.quantize_model(model)
    again = keras_qat.quantize_model(qat)
    assert [w.shape for w in again.trainable_weights] == [w.shape for w in qat.trainable_weights]
    assert not again.get_layer("quant_conv").layer.trainable


def test_scope_quantizes_only_what_it_names(model):
    qat = keras_qat.quantize_model(model, scope=["stem*", "depthwise*"])
    kernels = [
        quantizer.name for quantizer in keras_qat.quantizers(qat) if "kernel" in quantizer.name
    ]
    assert kernels == ["quant_stem/kernel", "quant_depthwise/depthwise_kernel"]
    by_predicate = keras_qat.quantize_model(
        model, scope=lambda layer: layer.name.startswith(("stem", "depthwise"))
    )
    assert by_predicate.get_config() == qat.get_config()


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(5,), (8, 3)])
def test_an_adapted_normalization_knows_the_input(shape):
    x = 1.0 + 3.0 * images(64, shape)
    normalization = layers.Normalization(name="norm")
    normalization.adapt(x)
    model = keras.Sequential([normalization, layers.Dense(4), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, 0.0 * x[..., :1], verbose=0)
    qat = observe(keras_qat.quantize_model(model, strict=True), x)
    assert model.input_shape == (None,) * (1 + len(shape))
    assert qat.input_shape == (*model.input_shape[:-1], shape[-1])
    expected = model.predict(x, verbose=0)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x)
    # TensorFlow 2.15 computes a Dense of unknown steps with another kernel.
    assert report.identical == 1 or len(shape) > 1
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(qat.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-5)
    plain = keras_qat.strip_quantization(qat)
    np.testing.assert_allclose(plain.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)


def test_a_normalization_that_does_not_know_its_input():
    normalization = layers.Normalization()
    normalization.adapt(images(64, (5,)))
    model = keras.Sequential([layers.Identity(input_shape=(None,)), normalization])
    for verb in (keras_qat.plan, keras_qat.quantize_model):
        with pytest.raises(ValueError, match=r"keras.Input\(shape\)"):
            verb(model)


@pytest.mark.legacy
def test_already_quantized_with_another_recipe():
    qat = keras_qat.quantize_model(tiny_net())
    with pytest.raises(ValueError, match=r"already quantized.*float model"):
        keras_qat.quantize_model(qat, recipe=keras_qat.recipes.int8(weight_bits=4))
    with pytest.raises(ValueError, match="already quantized"):
        keras_qat.plan(qat)
