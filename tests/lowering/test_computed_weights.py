"""What layers compute from their weights, in forms that Keras saves so that it cannot load them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import images

layers = keras.layers

MATRIX = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)

FORMS = {
    "of what is not": lambda x, w: x * tf.cast(w != 0.5, tf.float32),
    "an equation": lambda x, w: tf.matmul(x, tf.einsum("ij,jk->ik", w, w)),
    "an equation of one": lambda x, w: tf.matmul(x, tf.einsum("ij->ji", w)),
    "an equation with a constant": lambda x, w: tf.matmul(x, tf.einsum("ij,kj->ik", w, MATRIX)),
    "a constant on the left": lambda x, w: tf.matmul(x, MATRIX + w),
    "the last of all axes": lambda x, w: x * w[..., 0],
    "complex numbers": lambda x, w: x * tf.math.real(tf.exp(tf.cast(w, tf.complex64) * 1j)),
    "a list": lambda x, w: x * tf.reduce_sum([w, MATRIX], axis=(0, 1)),
}


class Computing(layers.Layer):
    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def build(self, input_shape):
        self.w = self.add_weight("w", (4, 4), initializer="random_normal")

    def call(self, inputs):
        return self.function(inputs, self.w)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_saved_as_they_are_computed(form, tmp_path):
    inputs, x = keras.Input((4, 4)), images(16, (4, 4))
    model = keras.Model(inputs, Computing(FORMS[form])(inputs))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    np.testing.assert_allclose(qat(x), model(x), atol=0.05 * np.abs(model(x)).max())
    contents = keras_qat.export_tflite(qat)
    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == contents
