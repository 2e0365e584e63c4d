"""`tf.scan` in layers of one's own."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import images, scramble

layers = keras.layers


class Smoothed(layers.Layer):
    """Exponential averages with a weight, as front ends of sound compute them."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind

    def build(self, shape):
        self.share = self.add_weight("share", shape[-1:], initializer="ones")

    def step(self, state, x):
        return 0.3 * self.share * x + 0.7 * state

    def both(self, states, rows):
        return self.step(states[0], rows[0]), tf.maximum(states[1], rows[1])

    def call(self, x):
        rows = tf.transpose(x, (1, 0, 2))
        if self.kind == "both":
            rows = sum(tf.scan(self.both, (rows, -rows), initializer=(x[:, 0], x[:, 1])))
        elif self.kind == "first":
            rows = tf.scan(self.step, rows)
        else:
            rows = tf.scan(self.step, rows, x[:, 1], reverse=self.kind == "reverse")
        return tf.transpose(rows, (1, 0, 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["both", "first", "plain", "reverse"])
def test_steps_are_in_integers(kind):
    inputs, x = keras.Input((3, 2)), images(32, (3, 2))
    model = scramble(keras.Model(inputs, Smoothed(kind)(inputs)))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    np.testing.assert_allclose(qat(x), model(x), atol=0.05)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


@pytest.mark.parametrize("steps", [33, None])
def test_long_loops_stay_in_float(steps):
    inputs = keras.Input((steps, 2))
    outputs = Smoothed("plain", name="smoothed")(inputs)
    assert "smoothed" in keras_qat.plan(keras.Model(inputs, outputs)).float_layers
