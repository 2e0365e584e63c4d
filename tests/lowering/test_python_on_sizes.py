"""Tests custom layers with Python code that reads sizes, and TensorFlow's loops of known length."""

import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.calls import flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.graph.sizes import find_example, find_sizes
from tests.comparison import assert_kept
from tests.helpers import build_model, images, keras, layers, quantize_on, scramble
from tests.networks.forms.python_on_sizes import HABITS, Own, step


class Function(Own):
    """AutoGraph converts its code for Keras, and does not treat symbolic sizes as loop counts."""

    @tf.function
    def call(self, x):
        y = x[:, 0]
        for index in tf.range(tf.shape(x)[1]):
            y = y + step(self, x[:, index])
        return y


class Outer(layers.Layer):
    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize("around", [lambda layer: layer, Outer])
def test_loops_in_a_call_that_is_a_function(around):
    model = build_model((3, 2), around(Function("steps_of_tensors")))
    assert not keras_qat.plan(model).float_layers


UNKNOWN = {
    "numbers": lambda layer, x: step(layer, x) if tf.reduce_max(x) > 0 else x,
    "length of the batch": lambda layer, x: x / tf.cast(len(x), tf.float32),
    "array of an unknown index": lambda layer, x: (
        tf.TensorArray(tf.float32, 1).write(tf.cast(x[0, 0, 0], tf.int32), x).read(0)
    ),
    "loop without end": lambda layer, x: tf.while_loop(
        lambda i, y: i < 40, lambda i, y: (i + 1, step(layer, y)), (0, x)
    )[1],
    "loop of numbers": lambda layer, x: tf.while_loop(
        lambda y: tf.reduce_max(y) > 9, lambda y: (step(layer, y),), (x,)
    )[0],
    "branch of numbers": lambda layer, x: tf.cond(
        tf.reduce_max(x) > 0, lambda: step(layer, x), lambda: x
    ),
    "branch of the batch": lambda layer, x: tf.cond(
        tf.shape(x)[0] > 3, lambda: step(layer, x), lambda: x
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_more_is_refused(name, monkeypatch):
    monkeypatch.setitem(HABITS, name, UNKNOWN[name])
    inputs = keras.Input((3, 2))
    with pytest.raises(ValueError, match="cannot be traced"):
        keras_qat.quantize_model(keras.Sequential([inputs, Own(name)]), strict=True)


def test_what_holds_sizes_is_looked_for_once():
    """In steps of a custom cell, 2**40 paths lead from the last sum to the first."""
    x = inputs = keras.Input((3,))
    for _ in range(40):
        x = x + tf.sin(x)
    model = keras.Model(inputs, [x, tf.cast(x, tf.int32)])
    value, index = flatten_values(read_model(model).outputs)
    assert find_example(value) is None
    assert find_sizes(index) is None


class Flagged(layers.Layer):
    """Initializes its weight only in the first call, like weight normalization of the add-ons."""

    def build(self, shape):
        self.weight = self.add_weight("weight", (shape[-1], 2))
        flag = {"initializer": "ones", "trainable": False}
        self.ready = self.add_weight("ready", (), tf.bool, **flag)
        self.count = self.add_weight("count", (), tf.int32, **flag)

    def call(self, x):
        factor = tf.cond(self.ready, lambda: 2.0, lambda: 1 / tf.reduce_max(tf.abs(self.weight)))
        y = step(self, x) * factor
        return tf.sin(y) if self.count > 3 else tf.nn.relu(y)


@pytest.mark.slow
def test_flags_that_do_not_train_are_numbers(tmp_path):
    inputs, layer = keras.Input((3, 4)), Flagged()
    model = scramble(keras.Model(inputs, layers.Dense(2)(layer(inputs))))
    x = images(16, (3, 4))
    plan = keras_qat.plan(model, target="ethos_u55")
    assert not plan.float_layers and not any("sin" in str(row.tensor) for row in plan.rows)
    qat = quantize_on(model, x, target="ethos_u55")
    assert_kept(qat, x, tmp_path)
