"""Tests that functions with a custom gradient are traced, and train with this gradient."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import assert_kept
from tests.helpers import assert_all_close, assert_all_equal, images, keras, layers


@tf.custom_gradient
def binarized(x):
    """Computes signs with a straight-through gradient between -1 and 1, as in binary networks."""
    return tf.sign(x), lambda gradient: gradient * tf.cast(tf.abs(x) <= 1.0, gradient.dtype)


def reversed_by(factor):
    @tf.custom_gradient
    def function(x, scale):
        return tf.identity(x), lambda gradient: (-factor * scale * gradient, None)

    return function


class Binary(layers.Layer):
    """Multiplies the signs of its weights and of its inputs."""

    def build(self, shape):
        self.kernel = self.add_weight("kernel", (shape[-1], 4))

    def call(self, x, training=None):
        return tf.matmul(binarized(x), binarized(self.kernel))


class Reversing(layers.Layer):
    """Reverses gradients, as in domain-adversarial networks."""

    def call(self, x):
        return reversed_by(0.5)(x, 2.0)


FORMS = {
    "binary": lambda x: Binary()(x),
    "reversing": lambda x: Reversing()(layers.Dense(4)(x)),
    "lambda": layers.Lambda(lambda x: tf.tanh(binarized(x))),
    "activation": lambda x: layers.Dense(4, activation=binarized)(x),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_own_gradients(form, tmp_path):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = layers.Dense(6, name="before")(inputs)
    model = keras.Model(inputs, layers.Dense(2)(FORMS[form](hidden)))
    x = images(32, (6,))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.set_quantization(qat, False)
    assert_all_close(gradients(qat, x), gradients(model, x), rtol=1e-3, atol=1e-5)
    keras_qat.set_quantization(qat, True)
    keras_qat.calibrate(qat, x)
    assert_kept(qat, x, tmp_path)
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    assert_all_equal(gradients(loaded, x), gradients(qat, x))


def gradients(model, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.sin(model(x, training=True)))
    found = tape.gradient(loss, model.trainable_weights)
    return sorted((np.asarray(g) for g in found if g is not None), key=lambda g: (g.shape, g.sum()))
