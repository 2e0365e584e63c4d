"""Tests that facts about tensors are computed once, and that equal computations are recognized."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.graph.calls import Value, flatten_values
from keras_qat.graph.facts import Facts, StructuralKeys, reach
from keras_qat.graph.operations import MOVES
from keras_qat.graph.read_model import read_model
from keras_qat.graph.sizes import evaluate, find_sizes
from keras_qat.lowering.read_operations import Uniform, find_uniform, read_operation
from tests.helpers import build_model, images, keras, quantize_on

KEEPS_SIGN = MOVES.union(("add", "multiply", "maximum", "minimum", "sqrt"))


def is_non_negative(value):
    """A new rule: whether all elements are non-negative."""
    kind, operands = read_operation(value.producer) if value.producer else ("", [])
    if kind in ("exp", "square", "abs", "relu", "sigmoid", "softmax"):
        return True
    if kind not in KEEPS_SIGN:
        return False
    known = []
    for x in tf.nest.flatten(operands[0]) if kind in MOVES else operands:
        known.append((yield x) if isinstance(x, Value) else np.min(x) >= 0)
    return any(known) if kind == "maximum" else all(known)


def outputs_of(function):
    x = keras.Input((3,), name="x")
    return flatten_values(read_model(keras.Model(x, function(x))).outputs)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: tf.reverse(tf.exp(x) + tf.square(x), [1]), True),
        (lambda x: tf.maximum(x, tf.abs(x)), True),
        (lambda x: tf.minimum(x, tf.abs(x)), False),
        (lambda x: tf.exp(x) - 1.0, False),
        (lambda x: 1.0 + tf.exp(x) * 2.0, True),
        (lambda x: tf.exp(x) * -2.0, False),
        (lambda x: tf.concat([tf.exp(x), [[-1.0, 1.0, 1.0]]], 0), False),
    ],
)
def test_a_new_fact(function, expected):
    (value,) = outputs_of(function)
    assert Facts().find(is_non_negative, value) is expected


def test_a_tensor_is_asked_about_once():
    def chain(x):
        y = tf.exp(x)
        for _ in range(200):
            y = y + tf.reverse(y, [1])
        return y

    (value,), facts, asked = outputs_of(chain), Facts(), []

    def is_non_negative_counted(value):
        asked.append(value)
        return (yield from is_non_negative(value))

    assert facts.find(is_non_negative_counted, value)
    assert facts.find(is_non_negative_counted, value.producer.inputs[0])
    assert len(asked) == len(set(asked)) == 401


def test_reach_returns_each_once_and_depth_first():
    following = {"a": "bc", "b": "d", "c": "db", "d": "a"}
    assert reach("a", following.__getitem__) == ["a", "b", "d", "c"]


def test_values_for_two_batch_sizes():
    def sizes(x):
        batch, size = tf.unstack(tf.shape(x))
        return [2 * size + 1, tf.range(size) * size, batch, batch // 2]

    constant, indices, batch, half = outputs_of(sizes)
    assert evaluate(constant) == (7, 7)
    assert evaluate(indices)[0].tolist() == [0, 3, 6]
    assert evaluate(batch) == (2, 61)
    assert find_sizes([constant, batch, half]) == [7, "batch", -1]


def test_uniform_constants():
    def constants(x):
        zeros, ones = tf.zeros_like(x), tf.ones_like(x)
        return [ones * 3.0 - zeros, x * zeros, x - 1e9 * ones, x + ones]

    facts, values = Facts(), outputs_of(constants)
    expected = [Uniform(3.0), Uniform(0.0), Uniform(-1e9, is_exact=False), None]
    assert [facts.find(find_uniform, value) for value in values] == expected


SIZE = 1500  # `repr` omits the middle of arrays with more than 1000 elements.


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
    model = build_model((SIZE,), lambda x: [combine(x, constant(0.0)), combine(x, constant(5.0))])
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
