"""Tests that values computed from a tensor's sizes are constants in files."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.calls import flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.graph.sizes import set_static_shapes
from keras_qat.ops.weighted_sums import RECENT
from tests.helpers import images, keras, layers, observe
from tests.networks.closed import OwnNorm
from tests.networks.forms.sizes import SHAPE, halved

pytestmark = pytest.mark.legacy


def model_of(function, shape=SHAPE):
    keras.utils.set_random_seed(1)
    x = keras.Input(shape)
    y = function(layers.Dense(6, activation="relu")(x))
    return keras.Model(x, layers.Dense(3)(y))


class RootMeanSquare(layers.Layer):
    def call(self, x):
        return x * tf.math.rsqrt(tf.reduce_mean(x**2, axis=-1, keepdims=True) + 1e-3)


class FirstRows(layers.Layer):
    """Rows of a constant table for each step, as in LLaMA's rotary embeddings."""

    def call(self, x):
        table = tf.constant(np.cos(np.arange(48.0)).reshape(16, 1, 3), tf.float32)
        first, second = tf.unstack(x, axis=-2)
        return (first + second) * table[0 : 0 + tf.shape(first)[-3]]


def test_models_of_any_length_that_are_called_with_a_known_one():
    steps = keras.Input((None, 6))
    halves = layers.Reshape((-1, 1, 2, 3))(RootMeanSquare()(layers.Dense(6)(steps)))
    inner = keras.Model(steps, FirstRows()(halves))
    inputs = keras.Input(SHAPE)
    model = keras.Model(inputs, layers.Dense(3)(layers.Reshape((8, 3))(inner(inputs))))
    assert not keras_qat.plan(model, target="ethos_u55").float_layers


class Frames(layers.Layer):
    def call(self, x):
        return tf.signal.frame(x, 8, 4)


class Around(layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.skipif(not RECENT, reason="norms are in float there")
@pytest.mark.parametrize("around", [lambda inner: inner, Around])
def test_sizes_that_opened_layers_give_to_those_behind_them(around):
    inputs, sound = keras.Input((32,)), keras.Input((None,))
    frames = layers.Dense(8)(OwnNorm()(Frames()(sound)))
    outputs = layers.Lambda(lambda x: tf.signal.overlap_and_add(x, 4))(frames)
    model = keras.Model(inputs, around(keras.Model(sound, outputs))(inputs))
    assert not keras_qat.plan(model, target="ethos_u55").float_layers


def test_what_is_the_same_for_many_examples_alone_is_no_constant():
    model = model_of(lambda x: x * tf.cast(tf.minimum(tf.shape(x)[0], 5), tf.float32))
    qat = keras_qat.quantize_model(model)
    keras_qat.set_quantization(qat, False)
    x = images(3, SHAPE)
    np.testing.assert_allclose(qat(x), model(x), rtol=1e-5)


def dropped(x):
    return x + tf.nn.dropout(tf.cast(tf.range(tf.shape(x)[1]), tf.float32), 0.5)[:, tf.newaxis]


@pytest.mark.parametrize(
    "function", [lambda x: x + tf.random.uniform([tf.shape(x)[1], 1]), dropped]
)
def test_random_numbers_of_a_known_shape_stay_random(function):
    qat = observe(keras_qat.quantize_model(model_of(function)), images(32, SHAPE))
    first, *others = (qat(images(1, SHAPE)) for _ in range(6))
    assert any(np.any(first != other) for other in others)


def test_sizes_that_are_unknown_and_divided_say_what_to_do():
    with pytest.raises(ValueError, match=r"divides integers.*Use //, or inputs of known sizes"):
        keras_qat.plan(model_of(halved, (None, 6)))


def test_weights_in_float64_are_not_taken_for_a_quotient():
    x = keras.Input((4,), dtype="int32")
    with pytest.raises(ValueError, match=r"computes or stores weights in float64"):
        keras_qat.plan(keras.Model(x, layers.Embedding(5, 3, dtype="float64")(x)))


def test_rows_of_each_example():
    """Later sizes depend on the number of rows."""
    inputs = keras.Input((6, 4))
    count = tf.shape(inputs)[0]
    rows = tf.reshape(inputs, (-1, 4))
    first, second = tf.split(tf.concat([inputs, inputs], 0), 2)
    outputs = [
        tf.reshape(y, (count, -1, 2))
        for y in (
            tf.tile(rows, [3, 1]),
            tf.repeat(rows, 2, axis=0),
            rows[::2],
            tf.gather(rows, 3 * tf.range(count)),
            tf.concat([rows, rows], 0),
            tf.concat([rows, rows], 0)[: 6 * count],
            first + second,
        )
    ]
    graph = read_model(keras.Model(inputs, outputs))
    set_static_shapes(graph)
    steps = [value.shape[1] for value in flatten_values(graph.outputs)]
    assert steps == [36, 24, 6, 2, 24, 12, 12]
