"""Tests float layers with Python's control flow, and models that run eagerly for debugging."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import images, keras
from tests.networks.small import layers

X = images(16, (6, 4))


class Branches(layers.Layer):
    """Branches on values, and stores what it saw in eager mode."""

    seen = None

    def call(self, x):
        if tf.executing_eagerly():
            self.seen = x.numpy()
        if tf.reduce_max(x) > 1:
            return x * 2.0
        return x * 3.0


@pytest.fixture
def qat():
    x = keras.Input((6, 4))
    y = layers.Dense(3)(layers.Flatten()(Branches()(layers.Conv1D(4, 3, activation="relu")(x))))
    with pytest.warns(UserWarning, match="cannot be traced"):
        model = keras_qat.quantize_model(keras.Model(x, y))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(X, np.zeros((16, 3)), validation_data=(X, np.zeros((16, 3))), verbose=0)
    return model


@pytest.fixture(params=["functions", "compile"])
def eagerly(request, qat):
    def start():
        if request.param == "functions":
            tf.config.run_functions_eagerly(True)
        else:
            qat.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True)

    yield start
    tf.config.run_functions_eagerly(False)


@pytest.mark.sample(1)
@pytest.mark.legacy
def test_eager_inference_computes_as_graphs_do(qat, eagerly):
    y, contents = qat.predict(X, verbose=0), keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, X).identical == 1
    eagerly()
    layer = next(layer for layer in qat.layers if isinstance(layer, Branches))
    for compute in (lambda: qat(X), lambda: qat.predict(X, verbose=0)):
        layer.seen = None
        np.testing.assert_array_equal(compute(), y)
        assert layer.seen is not None
    assert keras_qat.verify(qat, contents, X).identical == 1
    qat.fit(X, y, validation_data=(X, y), verbose=0)
    assert np.abs(qat(X) - y).max() > 0
    trained = qat(X)
    tf.config.run_functions_eagerly(False)
    qat.compile("sgd", "mse")
    np.testing.assert_array_equal(qat.predict(X, verbose=0), trained)
