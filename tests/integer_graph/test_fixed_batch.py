"""Models with a fixed batch size take other batches too, as their float models do in Keras."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import images, observe
from tests.networks.small import layers

SHAPE = (5, 4)
X = images(20, SHAPE)


def quantized(build, size=8):
    keras.utils.set_random_seed(3)
    x = keras.Input(SHAPE, batch_size=size)
    return observe(keras_qat.quantize_model(keras.Model(x, build(x))), X[:16], batches=2)


def with_shapes(x):
    x = layers.Dense(4)(layers.Conv1D(4, 3, padding="same")(x))
    return layers.Dense(3)(tf.reshape(x, (tf.shape(x)[0], 20)))


def with_the_batch(x):
    return layers.Dense(3)(tf.reshape(layers.Dense(4)(x), (8, -1)))


class ReadsBatch(layers.Layer):
    """A layer that wants to know the batch size."""

    def call(self, x):
        return tf.linalg.expm(tf.reshape(x, (x.shape[0], 5, 2, 2)))


@pytest.mark.legacy
def test_takes_batches_of_any_size():
    qat, with_open_batch = quantized(with_shapes), quantized(with_shapes, None)
    with_open_batch.set_weights(qat.get_weights())
    y = with_open_batch.predict(X, verbose=0)
    np.testing.assert_array_equal(qat.predict(X, verbose=0), y)
    np.testing.assert_array_equal(qat.predict(X, batch_size=8, verbose=0), y)
    np.testing.assert_array_equal(qat(X), y)
    qat.compile("sgd", "mse")
    assert qat.evaluate(X, y, verbose=0) == 0
    history = qat.fit(X[:8], y[:8], validation_data=(X, y), batch_size=8, verbose=0).history
    assert np.isfinite(history["val_loss"]).all()
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), X, per_layer=True)
    assert report.examples == 20
    assert report.identical == 1


@pytest.mark.legacy
def test_trains_with_full_batches_of_another_size():
    """The size is known then of the targets, too."""
    qat = quantized(with_shapes)
    qat.compile("sgd", "mse")
    y = qat.predict(X[:16], verbose=0)
    assert qat.evaluate(X[:16], y, batch_size=16, verbose=0) == 0
    assert np.isfinite(qat.fit(X[:16], y, batch_size=16, verbose=0).history["loss"]).all()


def test_operations_that_hold_the_batch_size():
    qat = quantized(with_the_batch)
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, X).identical == 1
    outputs = keras_qat.simulate(qat, X[:16]).outputs
    codes = keras_qat.TFLiteModel(contents).predict(X, codes=True)
    np.testing.assert_array_equal(next(iter(outputs.values())).codes, codes[:16])
    keras_qat.calibrate(qat, X[:16])


def test_layers_that_read_the_batch_size():
    qat = quantized(lambda x: layers.Dense(3)(layers.Flatten()(ReadsBatch()(x))))
    np.testing.assert_array_equal(qat.predict_on_batch(X[:8]), qat(X[:8]))
