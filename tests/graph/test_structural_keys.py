"""Equal computations are told from others by all of their arguments."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.graph.facts import StructuralKeys
from keras_qat.graph.read_model import read_model
from tests.helpers import images, keras, quantize_on

SIZE = 1500  # The text of larger arrays than 1000 leaves out the middle.


def constant(middle: float) -> np.ndarray:
    values = np.linspace(-1, 1, SIZE).astype(np.float32)
    values[SIZE // 2] = middle
    return values


@pytest.mark.parametrize(
    "combine",
    [
        lambda x, c: x + tf.constant(c),
        lambda x, c: x * c,
        lambda x, c: tf.maximum(x, c),
        lambda x, c: tf.where(x > 0.0, x, tf.constant(c)),
        lambda x, c: tf.gather(x, (c > 1).astype(int), axis=1),
    ],
    ids=["add", "multiply", "maximum", "where", "gather"],
)
def test_large_constants_that_differ_in_the_middle_are_two(combine):
    x = keras.Input((SIZE,))
    model = keras.Model(x, [combine(x, constant(0.0)), combine(x, constant(5.0))])
    data = images(8, (SIZE,))
    qat = quantize_on(model, data)
    first, second = qat.predict(data, verbose=0)
    expected = np.subtract(*model.predict(data, verbose=0))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(first - second, expected, atol=0.15)


def numbers_of(*build):
    x = keras.Input((3,), name="x")
    y = keras.Input((3,), name="y")
    model = keras.Model([x, y], [make(x, y) for make in build])
    keys = StructuralKeys()
    return [keys.find_index(value) for value in read_model(model).outputs]


def test_equal_operations_on_equal_tensors_share_a_number():
    first, second = numbers_of(
        lambda x, y: tf.exp(x - tf.reduce_max(x, 1, keepdims=True)),
        lambda x, y: tf.exp(x - tf.reduce_max(x, 1, keepdims=True)),
    )
    assert first == second


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x, y: tf.exp(x), lambda x, y: tf.exp(y)),
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: tf.reduce_max(x, 1), lambda x, y: tf.reduce_min(x, 1)),
        (lambda x, y: tf.roll(x, 1, 1), lambda x, y: tf.roll(x, 2, 1)),
        (lambda x, y: tf.unstack(x, axis=1)[0], lambda x, y: tf.unstack(x, axis=1)[1]),
        (lambda x, y: keras.layers.Dense(3)(x), lambda x, y: keras.layers.Dense(3)(x)),
        (
            lambda x, y: tf.random.uniform(tf.shape(x)) + x,
            lambda x, y: tf.random.uniform(tf.shape(x)) + x,
        ),
    ],
    ids=["tensors", "order", "operation", "arguments", "outputs", "layers", "random"],
)
def test_others_do_not(first, second):
    one, other = numbers_of(first, second)
    assert one != other
