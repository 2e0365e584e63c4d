"""TimeDistributed of open length is in integers, and computes what it does for a known length."""

import numpy as np
import pytest

import keras_qat
from tests.helpers import keras, layers, quantize_on

X = np.random.default_rng(0).normal(size=(6, 5, 8, 8, 3)).astype(np.float32)


def network():
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(3, 3, padding="same", activation="relu")(image)
    x = layers.BatchNormalization()(x)
    return keras.Model(image, layers.GlobalAveragePooling2D()(layers.Add()([x, image])))


LAYERS = {
    "max_pooling": layers.MaxPooling2D,
    "convolution": lambda: layers.Conv2D(4, 3),
    "batch_norm": layers.BatchNormalization,
    "flatten": layers.Flatten,
    "activation": lambda: layers.Activation("relu"),
    "separable": lambda: layers.SeparableConv2D(4, 3),
    "model": network,
    "rows": lambda: layers.TimeDistributed(layers.Conv1D(2, 3)),
}


def model_of(shape, names):
    keras.utils.set_random_seed(1)
    x = keras.Input(shape)
    return keras.Model(x, [layers.TimeDistributed(LAYERS[name](), name=name)(x) for name in names])


def calibrated(model):
    qat = quantize_on(model, X)
    return qat


def test_layers_of_any_length_are_planned_in_integers():
    assert not keras_qat.plan(model_of((None, 8, 8, 3), LAYERS)).float_layers


SOME = ["max_pooling", "batch_norm", "model"]


@pytest.mark.parametrize(
    "names", [SOME, pytest.param(sorted(LAYERS.keys() - SOME), marks=pytest.mark.slow)]
)
def test_any_length_computes_as_a_known_one(names):
    known, open_ = (model_of((steps, 8, 8, 3), names) for steps in (5, None))
    open_.set_weights(known.get_weights())
    qat = calibrated(open_)
    expected = calibrated(known).predict(X, verbose=0)
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
    for name, y, z in zip(names, expected, file.predict(X), strict=True):
        np.testing.assert_array_equal(y, z, err_msg=name)
    for y, z in zip(qat.predict(X[:, :3], verbose=0), file.predict(X[:, :3]), strict=True):
        np.testing.assert_array_equal(y, z)


@pytest.mark.slow
def test_open_images_of_open_length():
    model = model_of((None, None, None, 3), ["max_pooling", "convolution", "activation"])
    assert not keras_qat.plan(model).float_layers
    qat = calibrated(model)
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
    for x in (X, X[:, :2, :6]):
        for y, z in zip(qat.predict(x, verbose=0), file.predict(x), strict=True):
            np.testing.assert_array_equal(y, z)
