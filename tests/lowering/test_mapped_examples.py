"""`tf.map_fn` over the examples of a batch in layers of one's own."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_in_integers
from tests.helpers import images, scramble

layers = keras.layers


def of_one_axis(x):
    """Numbers of other axes, sizes and constants."""
    x = x - tf.reduce_mean(x, 0) * tf.constant([1.0, 0.5, 2.0])
    y = tf.reshape(x, [tf.shape(x)[0] * 3])
    return tf.stack([y[1:-1], tf.reverse(y, [0])[2:]], 1) + y[0]


def in_other_axes(x):
    y = tf.transpose(x)
    y = tf.concat([y, tf.expand_dims(y[:, 0], 1)], axis=1)
    return tf.nn.softmax(y, axis=0)


def product(x):
    a, b = tf.split(x, 2)
    return tf.reduce_sum(a[:, None] * b[None], axis=-1)


def rows_of_a_table(x):
    return tf.gather(x, [2, 0]) + tf.gather(x, [1, 1, 2], axis=1)[:2]


FUNCTIONS = {
    "one axis": of_one_axis,
    "other axes": in_other_axes,
    "product": product,
    "rows": rows_of_a_table,
}


@pytest.mark.parametrize(
    ("loop", "name"), [*(("map_fn", name) for name in FUNCTIONS), ("vectorized_map", "rows")]
)
def test_in_integers(loop, name, tmp_path):
    function = FUNCTIONS[name]
    inputs = keras.Input((4, 3))
    y = layers.Lambda(lambda x: getattr(tf, loop)(function, x))(layers.Dense(3)(inputs))
    model = scramble(keras.Model(inputs, y))
    assert_in_integers(model, images(8, (4, 3)), tmp_path)


def test_rows_that_an_input_names(tmp_path):
    """As positions of masked words."""
    x, rows = keras.Input((4, 3)), keras.Input((2,), dtype="int32")

    def taken(pair):
        return tf.map_fn(lambda one: tf.gather(one[0], one[1]), pair, fn_output_signature="float32")

    y = layers.Lambda(taken)((layers.Dense(3)(x), rows))
    model = scramble(keras.Model([x, rows], layers.Dense(2)(y)))
    named = np.random.default_rng(1).integers(0, 4, (8, 2)).astype("int32")
    assert_in_integers(model, [images(8, (4, 3)), named], tmp_path)


class Capsules(layers.Layer):
    """Votes of capsules: products with a weight, and what follows from weights alone."""

    def build(self, shape):
        self.matrices = self.add_weight("matrices", (2, *shape[1:], 5), initializer="random_normal")

    def votes(self, x):
        return tf.matmul(x[:, :, None], 0.5 * self.matrices)

    def call(self, inputs):
        tiled = tf.tile(inputs[:, None], (1, 2, 1, 1))
        return tf.reduce_sum(tf.squeeze(tf.map_fn(self.votes, tiled), 3), 2)


def test_functions_that_read_a_weight(tmp_path):
    inputs = keras.Input((4, 3))
    model = scramble(keras.Model(inputs, Capsules()(inputs)))
    with keras.utils.custom_object_scope({"Capsules": Capsules}):
        assert_in_integers(model, images(8, (4, 3)), tmp_path)


UNKNOWN = {
    "another tensor": lambda x: tf.map_fn(lambda one: one * x[0], x),
    "an operation": lambda x: tf.map_fn(lambda one: one[tf.argmax(one[:, 0])], x),
    "open sizes": lambda x: tf.map_fn(lambda one: tf.reduce_sum(tf.where(one > 0)), x, tf.int64),
    "no example": lambda x: tf.map_fn(lambda one: tf.ones(3), x),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_stays_in_float(name):
    inputs = keras.Input((4, 3))
    y = layers.Lambda(UNKNOWN[name])(layers.Dense(3)(inputs))
    assert len(keras_qat.plan(keras.Model(inputs, y)).float_layers) == 1
