"""Tests layer settings that change after the model was quantized."""

import numpy as np
import pytest

import keras_qat
from tests.helpers import images, keras, quantize_on, save_and_load
from tests.networks.small import functional, layers

X = images(16, (6, 6, 2))


def network(x):
    x = layers.Conv2D(3, 3, name="conv", use_bias=False)(x)
    x = layers.ReLU(name="relu")(layers.BatchNormalization(name="norm")(x))
    x = layers.Dropout(0.5)(layers.MaxPool2D(2, name="pool")(x))
    return layers.Dense(2, "softmax", name="scores")(layers.Flatten()(x))


def quantized():
    return quantize_on(functional((6, 6, 2), build=network), X)


def find(qat, path):
    layer, *inner = path.split(".")
    part = qat.get_layer(layer)
    for name in inner:
        part = getattr(part, name)
    return part


CHANGES = {
    "quant_conv": ("activation", keras.activations.tanh),
    "quant_conv.layer": ("activation", keras.activations.tanh),
    "quant_conv.activation": ("max_value", 0.5),
    "quant_conv.batch_norm": ("epsilon", 0.5),
    "quant_scores": ("activation", keras.activations.linear),
    "quant_scores.layer": ("use_bias", False),
    "quant_scores_activation": ("activation", keras.activations.linear),
    "quant_pool": ("pool_size", (1, 1)),
}


@pytest.mark.parametrize("is_loaded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_changed_settings_are_refused(is_loaded, tmp_path):
    qat = quantized()
    if is_loaded:
        qat = save_and_load(qat, tmp_path / "qat.keras")
    qat.compile("sgd", "mse")
    expected = qat.predict(X, verbose=0)
    for path, (name, value) in CHANGES.items():
        part = find(qat, path)
        before = vars(part)[name]
        setattr(part, name, value)
        message = f"^'{name}' of layer '.*' was changed after '{qat.name}' was quantized\\."
        for use in (
            lambda: qat.predict(X, verbose=0),
            lambda: qat.fit(X, expected, verbose=0),
            lambda: keras_qat.export_tflite(qat),
            lambda: keras_qat.simulate(qat, X),
        ):
            with pytest.raises(ValueError, match=message):
                use()
        setattr(part, name, before)
    np.testing.assert_array_equal(qat.predict(X, verbose=0), expected)


def test_what_a_wrapper_does_not_have_is_the_layers():
    qat = quantized()
    qat.get_layer("quant_conv").strides = 2
    with pytest.raises(ValueError, match="'strides' of layer 'conv' was changed"):
        qat.predict(X, verbose=0)


def test_settings_of_training_and_equal_ones_may_be_set():
    qat = quantized()
    expected = qat.predict(X, verbose=0)
    conv = qat.get_layer("quant_conv")
    conv.trainable = False
    conv.layer.kernel_regularizer = keras.regularizers.L2(0.1)
    conv.layer.strides = (1, 1)
    conv.batch_norm.momentum = 0.5
    conv.note = "mine"
    next(item for item in qat.layers if isinstance(item, layers.Dropout)).rate = 0.1
    np.testing.assert_array_equal(qat.predict(X, verbose=0), expected)
    qat.compile("sgd", "mse")
    qat.fit(X, expected, verbose=0)
