"""Tests that each patch lets code of one kind be traced, and that threads can trace at once."""

import random
import threading

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.debug_graph import describe_call
from keras_qat.graph.read_model import read_model
from keras_qat.tracing import patches
from keras_qat.tracing.trace_layer import trace_layer
from tests.networks.small import functional, layers

SHAPE = (6, 4)


class Code(layers.Layer):
    """Runs a function with a weight and an inner layer."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.dense = layers.Dense(4)

    def build(self, shape):
        self.scale = self.add_weight("scale", (4,), initializer="ones")

    def call(self, x, training=None):
        return self.function(self, x, training)


@tf.custom_gradient
def with_custom_gradient(x):
    return tf.round(x), lambda gradient: gradient


def count_steps(layer, x, training):
    for _ in range(tf.shape(x)[1] - 4):
        x = tf.tanh(x)
    return x


def checked(layer, x, training):
    tf.debugging.assert_equal(tf.shape(x)[-1], 4)
    return tf.tanh(x)


def typed(layer, x, training):
    return tf.tanh(x) if isinstance(x, tf.Tensor) else x


def with_loss(layer, x, training):
    layer.add_loss(tf.reduce_sum(x))
    return tf.tanh(x)


def repeated(layer, x, training):
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.tanh(y)), (0, x))[1]


EXAMPLES = {
    "weights are symbolic tensors": lambda layer, x, _: x * layer.scale,
    "losses are collected": with_loss,
    "lists of weights are symbolic": lambda layer, x, _: x * layer.weights[0],
    "inner calls are recorded": lambda layer, x, _: layer.dense(x),
    "loops are unrolled": repeated,
    "Python and NumPy draw their largest values": lambda layer, x, training: (
        x if training and random.random() < 1.0 else tf.tanh(x)
    ),
    "TensorFlow draws in each step": lambda layer, x, training: (
        x + tf.random.normal((4,)) if training else x
    ),
    "sizes are integers": count_steps,
    "Fourier transforms are recorded": lambda _, x, __: tf.abs(tf.signal.rfft(x)),
    "custom gradients are recorded": lambda _, x, __: with_custom_gradient(x),
    "functions of TensorFlow run as Python code": lambda _, x, __: tf.function(tf.tanh)(x),
    "code is not executed eagerly": lambda layer, x, training: (
        tf.tanh(x) * (2.0 if tf.executing_eagerly() else 1.0)
    ),
    "assertions pass": checked,
    "a convolution of a sequence is one operation": lambda layer, x, training: tf.nn.convolution(
        x, np.ones((2, 4, 4), "float32"), dilations=2
    ),
    "symbolic tensors are tensors": typed,
}
"""Name of a patch -> code that needs it."""


def trace(function):
    """Returns the calls inside a layer as text, or why it cannot be traced."""
    model = functional(SHAPE, build=lambda x: Code(function, name="code")(x))
    try:
        graph = trace_layer(read_model(model).calls[0]).graph
    except Exception as error:
        return error
    return [describe_call(call) for call in [*graph.calls, *graph.loss_only]]


@pytest.mark.parametrize("patch", patches.PATCHES)
def test_each_patch_is_needed(patch, monkeypatch):
    function = EXAMPLES[patch]
    traced = trace(function)
    assert not isinstance(traced, Exception), traced
    monkeypatch.delitem(patches.PATCHES, patch)
    assert trace(function) != traced


def test_nothing_stays_patched():
    names = "Tensor", "while_loop", "is_tensor", "custom_gradient"
    before = [getattr(tf, name) for name in names], layers.Layer.__call__, random.random
    trace(repeated)
    assert ([getattr(tf, name) for name in names], layers.Layer.__call__, random.random) == before


def test_threads_quantize_at_once():
    functions = [count_steps, repeated, typed, EXAMPLES["inner calls are recorded"]]
    models = [functional(SHAPE, build=lambda x, f=f: Code(f, name="code")(x)) for f in functions]
    expected = [str(keras_qat.plan(model)) for model in models]
    plans, drawn = {}, []

    def quantize(index):
        plans[index] = str(keras_qat.plan(models[index]))
        keras_qat.quantize_model(models[index])

    def draw():
        while len(plans) < len(models):
            drawn.append(random.random())
            layers.Dense(2)(tf.ones((1, 2)))

    threads = [threading.Thread(target=quantize, args=[index]) for index in range(len(models))]
    threads.append(threading.Thread(target=draw))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [plans[index] for index in range(len(models))] == expected
    assert max(drawn) < 1.0
