"""TimeDistributed of open length computes in float."""

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


@pytest.mark.slow
def test_layers_of_any_length_compute_in_float():
    model = model_of((None, 8, 8, 3), LAYERS)
    assert {"max_pooling", "convolution", "model"} <= keras_qat.plan(model).float_layers.keys()
    qat = quantize_on(model, X)
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
    for x in (X, X[:, :3]):
        for y, z in zip(qat.predict(x, verbose=0), file.predict(x), strict=True):
            np.testing.assert_allclose(y, z, atol=0.05)
