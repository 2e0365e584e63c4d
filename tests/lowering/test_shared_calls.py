"""A layer inside that is called with other weights, constants or sizes each time."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_kept
from tests.helpers import images

layers = keras.layers
CONSTANTS = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)


class Product(layers.Layer):
    """Multiplies by what it is given."""

    def call(self, x, kernel):
        return tf.matmul(x, kernel)


class Shared(layers.Layer):
    """Calls one layer twice."""

    def __init__(self, inner, shapes=(), **kwargs):
        super().__init__(**kwargs)
        self.inner, self.shapes = inner, shapes

    def build(self, _):
        self.pairs = [
            [self.add_weight(f"{name}{index}", shape, initializer="random_normal") for name in "ab"]
            for index, shape in enumerate(self.shapes)
        ]

    def call(self, x):
        first, second = zip(*self.pairs, strict=True) if self.pairs else ((), ())
        return self.inner([self.inner([x, *first]), *second])

    def get_config(self):
        return {**super().get_config(), "inner": self.inner, "shapes": self.shapes}


class Products(Shared):
    """Calls one layer twice, by arguments."""

    def call(self, x):
        ((first, second),) = self.pairs
        return self.inner(self.inner(x, first), second)


class OfConstants(Shared):
    """Gives one layer two constants."""

    def call(self, x):
        return self.inner(self.inner(x, CONSTANTS[0]), CONSTANTS[1])


class OfSizes(Shared):
    """Gives one layer two sizes."""

    def call(self, x):
        return self.inner(x) + self.inner(x[:, :2])


def biased(x):
    return tf.nn.bias_add(tf.matmul(x[0], x[1]), x[2])


def resized(x):
    return tf.reduce_sum(tf.image.resize(x[..., None], [x.shape[1] * 2, 4]), [1, 2])


def shapes(*rank):
    return [(4,) * axes for axes in rank]


CALLED_TWICE = {
    "tensordot": lambda: Shared(layers.Lambda(lambda x: tf.tensordot(*x, axes=[-1, 0])), shapes(2)),
    "bias": lambda: Shared(layers.Lambda(biased), shapes(2, 1)),
    "conv": lambda: Shared(layers.Lambda(lambda x: tf.nn.conv1d(x[0], x[1], 1, "SAME")), shapes(3)),
    "layer": lambda: Products(Product(), shapes(2)),
    "constants": lambda: OfConstants(Product()),
    "sizes": lambda: OfSizes(layers.Lambda(resized)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CALLED_TWICE)
def test_each_call_has_its_own(name, tmp_path):
    keras.utils.set_random_seed(0)
    inputs, x = keras.Input((4, 4)), images(16, (4, 4))
    model = keras.Model(inputs, CALLED_TWICE[name]()(inputs))
    qat, expected = keras_qat.quantize_model(model, strict=True), model.predict(x, verbose=0)
    keras_qat.calibrate(qat, x)
    step = np.abs(expected).max() / 128
    np.testing.assert_allclose(qat.predict(x, verbose=0), expected, atol=6 * step)
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    assert_kept(qat, x, tmp_path)
