"""Functions of one tensor that a model computes with several operations are one table."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.helper_layers.elementwise_functions import Formula
from keras_qat.keras2.backend import keras
from keras_qat.lowering import lower
from tests.comparison import assert_kept
from tests.helpers import images
from tests.networks.small import functional

pytestmark = pytest.mark.legacy
layers, backend, log = keras.layers, keras.backend, tf.math.log
SHAPE = (4, 6)


def tanh(x):
    return (tf.exp(x) - tf.exp(-x)) / (tf.exp(x) + tf.exp(-x))


def behind_others(x):
    """Reads a convolution's output, not what the convolution reads."""
    y = layers.Conv1D(4, 1)(x)
    return y * tf.tanh(backend.log(1 + backend.exp(y)))


ONE = {
    "softplus": lambda x: log(1.0 + tf.exp(x)),
    "softplus of log1p": lambda x: tf.math.log1p(tf.exp(x)),
    "mish": lambda x: x * tf.tanh(backend.log(1 + backend.exp(x))),
    "sigmoid": lambda x: 1.0 / (1.0 + tf.exp(-x)),
    "sigmoid, multiplied": lambda x: tf.math.reciprocal(tf.exp(x * -2.0) + 1.0) * 3.0 - 1.0,
    "swish": lambda x: x / (1.0 + tf.exp(-x)),
    "tanh": tanh,
    "log of the sigmoid": lambda x: log(tf.sigmoid(x) + 1e-7),
    "log of squares": lambda x: log(tf.square(x) + 1e-2),
    "log of products": lambda x: log(x * x + 1e-2),
    "Charbonnier": lambda x: tf.sqrt(x**2 + 1e-6),
    "a root of powers": lambda x: tf.pow(1.0 + tf.pow(x, 2), -0.5),
    "log cosh": lambda x: log(tf.cosh(x)),
    "ELU": lambda x: tf.where(x > 0.0, x, tf.exp(x) - 1.0),
    "ELU of a minimum": lambda x: tf.maximum(x, 0.0) + tf.minimum(0.0, 2.0 * (tf.exp(x) - 1.0)),
    "a clipped power": lambda x: tf.clip_by_value(tf.exp(x), 1e-3, 2.0),
    "limits in another order": lambda x: tf.clip_by_value(
        tf.exp(x), clip_value_max=2.0, clip_value_min=1e-3
    ),
    "a choice in another order": lambda x: tf.where(x > 0.0, y=tf.exp(x) - 1.0, x=x),
    "a quotient": lambda x: tf.sin(x) / (1.0 + tf.abs(x)),
    "Gauss": lambda x: tf.exp(-0.5 * tf.square(x - 0.5)),
}

SEVERAL = {
    "of two tensors": lambda x: log(tf.exp(x[:, :2]) + tf.exp(x[:, 2:])),
    "of a sum": lambda x: log(tf.reduce_sum(tf.exp(x), -1)),
    "of an array": lambda x: log(tf.exp(x) + np.arange(1.0, 7.0, dtype=np.float32)),
    "one wide function": lambda x: 1.0 + tf.exp(-x),
    "swish of the sigmoid": lambda x: x * tf.sigmoid(x),
    "a choice by another tensor": lambda x: tf.where(x[:, :2] > 0, x[:, 2:], tf.exp(x[:, 2:])),
    "a comparison": lambda x: tf.cast(tf.sigmoid(x) > 0.5, tf.float32) * x,
    "of whole numbers": lambda x: tf.cast(tf.argmax(x, -1), tf.float32),
}


@pytest.mark.parametrize("name", [*ONE, *SEVERAL, "behind others"])
def test_one_layer_computes_the_same(name):
    model = functional(SHAPE, build={**ONE, **SEVERAL, "behind others": behind_others}[name])
    lowered = lower(read_model(model))
    kinds = [type(call.layer) for call in lowered.calls]
    if name in ONE:
        assert kinds == [Formula]
    assert (Formula in kinds) is (name not in SEVERAL)
    x = 2 * images(4, SHAPE)
    rebuilt = rebuild_model(lowered)
    rebuilt.set_weights(model.get_weights())
    np.testing.assert_allclose(rebuilt(x), model(x), rtol=1e-5, atol=1e-5)


def test_steps_that_others_read_stay():
    inputs = keras.Input(SHAPE)
    wide = tf.exp(inputs)
    model = keras.Model(inputs, [log(1.0 + wide), layers.Dense(3)(wide)])
    lowered = lower(read_model(model))
    names = [getattr(call.layer, "symbol", type(call.layer).__name__) for call in lowered.calls]
    assert sorted(names) == ["Dense", "Formula", "math.exp"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ONE)
def test_what_a_step_would_lose_is_kept(name, tmp_path):
    model, x = functional(SHAPE, build=ONE[name]), 6 * images(16, SHAPE) - 3.0
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    expected = np.asarray(model(x))
    assert np.std(qat(x) - expected) < 0.05 * np.std(expected)
    assert_kept(qat, x, tmp_path)


OF_SHARES = {
    "alone": lambda x: log(tf.nn.softmax(x)),
    "of a layer, along another axis": lambda x: log(layers.Softmax(1)(x)),
    "a number added": lambda x: log(tf.nn.softmax(x) + 1e-8),
    "clipped": lambda x: backend.log(backend.clip(backend.softmax(x), 1e-7, 1 - 1e-7)),
    "a root": lambda x: tf.pow(tf.nn.softmax(x), 0.2),
    "exponentials added up": lambda x: log(tf.reduce_sum(tf.exp(x), 1)),
    "kept axes": lambda x: x - log(tf.reduce_sum(tf.exp(x), -1, keepdims=True)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OF_SHARES)
def test_logarithms_of_shares(name, tmp_path):
    model, x = functional(SHAPE, build=OF_SHARES[name]), 6 * images(16, SHAPE)
    lowered = lower(read_model(model))
    symbols = {getattr(call.layer, "symbol", type(call.layer).__name__) for call in lowered.calls}
    assert not symbols & {"nn.softmax", "Softmax"} and "math.reduce_max" in symbols
    expected = np.asarray(model(x))
    np.testing.assert_allclose(rebuild_model(lowered)(x), expected, rtol=1e-4, atol=1e-4)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    assert np.std(qat(x) - expected) < 0.03 * np.std(expected)
    assert_kept(qat, x, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_logarithms_of_a_layer_with_an_activation(activation):
    inputs = keras.Input(SHAPE)
    outputs = log(layers.Dense(5, activation=activation)(inputs) + 1e-7)
    model, x = keras.Model(inputs, outputs), 6 * images(16, SHAPE)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    expected = np.asarray(model(x))
    assert np.std(qat(x) - expected) < 0.05 * np.std(expected)


def test_shares_stay_for_others():
    """As an entropy: the logarithm is computed beside them."""
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
