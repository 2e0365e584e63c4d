"""Tests that functions and softmaxes written with several operations become one layer."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.helper_layers.elementwise_functions import Formula
from keras_qat.lowering import lower
from tests.helpers import images, keras
from tests.networks.forms.patterns import FUNCTIONS, OF_SHARES, ONE, SHAPE, shifted, total
from tests.networks.small import functional

pytestmark = pytest.mark.legacy
layers, backend, log = keras.layers, keras.backend, tf.math.log


def behind_others(x):
    """Reads a convolution's output, not its input."""
    y = layers.Conv1D(4, 1)(x)
    return y * tf.tanh(backend.log(1 + backend.exp(y)))


SEVERAL = {
    "of two tensors": lambda x: log(tf.exp(x[:, :2]) + tf.exp(x[:, 2:])),
    "of a sum": lambda x: log(tf.reduce_sum(tf.exp(x), -1)),
    "of an array": lambda x: log(tf.exp(x) + np.arange(1.0, 7.0, dtype=np.float32)),
    "one wide function": lambda x: 1.0 + tf.exp(-x),
    "a square of a sum": lambda x: tf.square(x + 0.5),
    "swish of the sigmoid": lambda x: x * tf.sigmoid(x),
    "a choice by another tensor": lambda x: tf.where(x[:, :2] > 0, x[:, 2:], tf.exp(x[:, 2:])),
    "a comparison": lambda x: tf.cast(tf.sigmoid(x) > 0.5, tf.float32) * x,
    "of whole numbers": lambda x: tf.cast(tf.argmax(x, -1), tf.float32),
}


def assert_lowered_alike(build):
    """Asserts that the lowered model computes the same, and returns the kinds of its layers."""
    model, x = functional(SHAPE, build=build), 2 * images(4, SHAPE)
    lowered = lower(read_model(model))
    rebuilt = rebuild_model(lowered)
    rebuilt.set_weights(model.get_weights())
    np.testing.assert_allclose(rebuilt(x), model(x), rtol=1e-5, atol=1e-5)
    return [type(call.layer) for call in lowered.calls]


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", [*FUNCTIONS, *SEVERAL, "behind others"])
def test_one_layer_computes_the_same(name):
    build = {**FUNCTIONS, **SEVERAL, "behind others": behind_others}[name]
    kinds = assert_lowered_alike(build)
    if name in FUNCTIONS:
        assert kinds == [Formula]
    assert (Formula in kinds) is (name not in SEVERAL)


SEVERAL_SOFTMAXES = {
    "a number added, nothing subtracted": lambda x: tf.exp(x) / (total(tf.exp(x)) + 1e-7),
    "a large number added": lambda x: shifted(x) / (total(shifted(x)) + 1e-2),
    "of others": lambda x: tf.exp(x) / total(tf.exp(-x)),
    "of other parts": lambda x: tf.exp(x[:, :2]) / total(tf.exp(x[:, 2:])),
    "of several outputs": lambda x: (
        tf.exp(tf.split(x, 2, 1)[0]) / total(tf.exp(tf.split(x, 2, 1)[1]))
    ),
    "one less": lambda x: tf.exp(x - 1.0) / total(tf.exp(1.0 - x)),
    "along other axes": lambda x: tf.exp(x[:, :, :4]) / total(tf.exp(x[:, :, :4]), 1),
    "of a part of it": lambda x: tf.exp(x[:, :1]) / tf.reduce_sum(tf.exp(x), 1, keepdims=True),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [*ONE, *SEVERAL_SOFTMAXES])
def test_one_softmax_computes_the_same(name):
    kinds = assert_lowered_alike({**ONE, **SEVERAL_SOFTMAXES}[name])
    assert (kinds == [layers.Softmax]) is (name in ONE)


def test_steps_that_others_read_stay():
    inputs = keras.Input(SHAPE)
    wide = tf.exp(inputs)
    model = keras.Model(inputs, [log(1.0 + wide), layers.Dense(3)(wide)])
    lowered = lower(read_model(model))
    names = [getattr(call.layer, "symbol", type(call.layer).__name__) for call in lowered.calls]
    assert sorted(names) == ["Dense", "Formula", "math.exp"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OF_SHARES)
def test_logarithms_of_shares(name):
    model, x = functional(SHAPE, build=OF_SHARES[name]), 6 * images(16, SHAPE)
    lowered = lower(read_model(model))
    symbols = {getattr(call.layer, "symbol", type(call.layer).__name__) for call in lowered.calls}
    assert not symbols & {"nn.softmax", "Softmax"} and "math.reduce_max" in symbols
    expected = np.asarray(model(x))
    np.testing.assert_allclose(rebuild_model(lowered)(x), expected, rtol=1e-4, atol=1e-4)


def test_shares_stay_for_others():
    """In an entropy, the logarithm has another consumer."""
    shares = tf.nn.softmax(keras.Input(SHAPE, name="scores"))
    model = keras.Model(shares._keras_history.layer.input, [log(shares), layers.Dense(3)(shares)])
    symbols = [getattr(call.layer, "symbol", "") for call in lower(read_model(model)).calls]
    assert "nn.softmax" in symbols and "math.reduce_max" in symbols


@pytest.mark.parametrize(
    "function", [lambda x: log(x * x), lambda x: tf.sqrt(tf.square(x)), lambda x: 1 / tf.sqrt(x**2)]
)
def test_zeros_have_finite_numbers_and_slopes(function):
    layer = lower(read_model(functional(SHAPE, build=function))).calls[0].layer
    x = tf.constant([0.0, 0.5, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
    assert type(layer) is Formula and np.abs(y).max() < 3
    assert np.isfinite(tape.gradient(y, x)).all()
