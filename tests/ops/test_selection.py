"""Quotients by zero, numbers that are too large, and constants that strip puts back."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.frontend.keras2.backend import keras
from tests.helpers import images, observe


def test_large_integers_keep_their_value_and_larger_ones_the_end_of_the_range():
    x = keras.Input((6,), dtype="int32")
    qat = keras_qat.quantize_model(keras.Model(x, tf.cast(x, tf.float32)))
    data = np.array([[0, 1_000, -5_000, 40_000, -40_000, 9]] * 8, np.int32)
    keras_qat.calibrate(qat, data)
    data[:, 3:] = 2**31 - 1, -(2**31), 30_000
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, data).identical == 1
    found = keras_qat.TFLiteModel(contents).predict(data)
    np.testing.assert_allclose(found, np.clip(data, -40_000, 40_000), atol=400)


def test_a_quotient_by_zero_is_the_largest():
    inputs = [keras.Input((4,)) for _ in range(2)]
    qat = keras_qat.quantize_model(keras.Model(inputs, inputs[0] / inputs[1]))
    numerator = np.float32([[1.0, -1.0, 0.5, 0.2]] * 8)
    denominator = np.float32([[1.0, 0.5, 2.0, -1.0]] * 8)
    keras_qat.calibrate(qat, [numerator, denominator])
    contents = keras_qat.export_tflite(qat)
    (limits,) = (out.params for out in keras_qat.resolve(qat).outputs.values())
    denominator[:, :2] = 0.0
    assert keras_qat.verify(qat, contents, [numerator, denominator]).identical == 1
    found = qat.predict([numerator, denominator], verbose=0)[0]
    ends = [limits.scale * (end - limits.zero_point) for end in (limits.highest, limits.lowest)]
    np.testing.assert_allclose(found[:2], ends, rtol=1e-6)


def _anchored(x):
    return np.float32([[0.5, -1.0, 2.0]]) + tf.einsum("bi,bj->bi", x, x)


def _banked(x):
    return keras.layers.Dense(3)(tf.matmul(x, np.ones((3, 5), np.float32)))


class Scaled(keras.layers.Layer):
    """A weight that trains beside a constant that does not."""

    def build(self, input_shape):
        self.factor = self.add_weight("factor", (5,), initializer="ones")

    def call(self, x):
        return tf.cumsum(tf.matmul(x, np.eye(3, 5, dtype="float32")) * self.factor, axis=1)


@pytest.mark.parametrize("build", [_anchored, _banked, lambda x: Scaled()(x)])
def test_strip_puts_constants_back(build):
    x = keras.Input((3,))
    model = keras.Model(x, build(x))
    data = images(16, (3,))
    qat = observe(keras_qat.quantize_model(model), data)
    qat.set_weights([weight * 0.5 for weight in qat.get_weights()])
    stripped = keras_qat.strip_quantization(qat)
    assert len(stripped.trainable_weights) == len(model.trainable_weights)
    for before, after in zip(model.weights, stripped.weights, strict=True):
        np.testing.assert_allclose(after, 0.5 * before)
