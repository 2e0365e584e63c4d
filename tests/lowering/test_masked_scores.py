"""Reading numbers that masks hide: they set no range where they are ignored."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.helper_layers.operations import MaskScores
from keras_qat.keras2.backend import keras
from tests.comparison import assert_kept
from tests.helpers import rng, scramble

layers = keras.layers
SIZE = 8


def entropy(hidden):
    shares = tf.nn.softmax(hidden)
    return -tf.reduce_sum(shares * tf.nn.log_softmax(hidden), -1, keepdims=True)


def of_two(hidden):
    return tf.concat([tf.nn.softmax(hidden), tf.reduce_max(hidden, -1, keepdims=True)], -1)


BELOW = {
    "several": of_two,
    "entropy": entropy,
    "logsumexp": lambda x: tf.reduce_logsumexp(x, -1, keepdims=True),
    "exp of log_softmax": lambda x: tf.exp(tf.nn.log_softmax(x)),
    "negative": lambda x: tf.reduce_min(-x, -1, keepdims=True),
    "line": lambda x: tf.nn.softmax(1.0 - (-2.0 * x + 0.5)),
    "cast": lambda x: tf.nn.softmax(tf.cast(x, "float32")),
    "softplus": lambda x: tf.math.softplus(x + 1.0),
    "tanh": tf.tanh,
    "relu": lambda x: tf.nn.relu(x + 3.0),
    "maximum": lambda x: tf.maximum(0.2, x),
    "pooled": lambda x: layers.GlobalMaxPooling1D()(layers.MaxPooling1D(2)(x[..., None])),
}
ABOVE = {
    "reduce_min": lambda x: tf.reduce_min(x, 1, keepdims=True),
    "argmin": lambda x: tf.one_hot(tf.argmin(x, -1), SIZE),
    "softmin": lambda x: tf.nn.softmax(-x),
    "minimum": lambda x: tf.minimum(x, [0.1] * SIZE),
    "sigmoid": tf.sigmoid,
    "nearest": lambda x: tf.math.top_k(-x, 2)[0],
}
MASKS = {
    "sum": lambda mask, x, end: x + (1.0 - mask) * end,
    "less one": lambda mask, x, end: x - (mask - 1.0) * end,
    "quotient": lambda mask, x, end: x + (1.0 - mask) / (1.0 / end),
    "where": lambda mask, x, end: tf.where(mask > 0.0, x, end),
    "infinite": lambda mask, x, end: tf.where(mask == 0.0, end * np.inf, x),
}


def model_of(mask, reader, end):
    keras.utils.set_random_seed(1)
    x, seen = keras.Input((SIZE,)), keras.Input((SIZE,))
    return scramble(keras.Model([x, seen], reader(mask(seen, layers.Dense(SIZE)(x), end))))


def data():
    seen = rng(2).random((64, SIZE)) < 0.7
    seen[:, :2] = True
    return [rng(1).normal(size=(64, SIZE)).astype(np.float32), seen.astype(np.float32)]


CASES = [
    *((name, mask, -1e9) for name in BELOW for mask in ("sum", "where")),
    *((name, mask, 1e9) for name in ABOVE for mask in MASKS),
    *(("sigmoid below", mask, -1e9) for mask in MASKS),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("reader", "mask", "end"), CASES)
def test_hidden_numbers_set_no_range(reader, mask, end, tmp_path):
    readers = {**(BELOW if end < 0 else ABOVE), "sigmoid below": tf.sigmoid}
    model, x = model_of(MASKS[mask], readers[reader], end), data()
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    in_float = model(x)
    noise = in_float - qat(x)
    assert 10 * np.log10(np.sum(in_float**2) / max(np.sum(noise**2), 1e-9)) > 25
    assert_kept(qat, x, tmp_path)


def test_infinity_that_is_read_has_no_range():
    x = data()
    model = model_of(MASKS["infinite"], lambda x: tf.maximum(x, tf.sin(x)), -1e9)
    assert "tf.where" in str(keras_qat.plan(model))
    with pytest.raises(ValueError, match="infinity from this data, first in the output"):
        keras_qat.calibrate(keras_qat.quantize_model(model), x)


READ = {
    "summed": lambda x: tf.reduce_sum(tf.concat([tf.nn.softmax(x), 1e-9 * x], -1), -1),
    "returned": lambda x: x,
    "larger of two": lambda x: tf.maximum(x, tf.sin(x)),
    "softmax of hidden above": lambda x: tf.nn.softmax(-x),
    "share of what is subtracted": lambda x: tf.sigmoid(x - tf.reduce_mean(x, -1, keepdims=True)),
}


@pytest.mark.parametrize("reader", READ)
def test_what_is_read_is_not_hidden(reader):
    qat = keras_qat.quantize_model(model_of(MASKS["where"], READ[reader], -1e9))
    assert not any(isinstance(layer, MaskScores) for layer in qat._flatten_layers())


AGAIN = {
    "where": lambda seen, x: (tf.where(seen, x, -1e9), tf.where(seen, x, 0.0)),
    "negated": lambda seen, x: (
        x + (1.0 - tf.cast(seen, tf.float32)) * -1e9,
        tf.where(tf.logical_not(seen), 0.0, x),
    ),
}
"""A mask, and the same that replaces what it hides."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", AGAIN)
def test_the_same_mask_replaces_what_it_hides(form, tmp_path):
    x, seen = keras.Input((SIZE,)), keras.Input((SIZE,), dtype="bool")
    logs = tf.nn.log_softmax(AGAIN[form](seen, layers.Dense(SIZE)(x))[0])
    shown = AGAIN[form](seen, logs)[1]
    model = scramble(keras.Model([x, seen], -tf.reduce_sum(tf.exp(logs) * shown, -1)))
    values = [data()[0], data()[1] > 0.0]
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, values)
    in_float = model(values)
    noise = in_float - qat([tf.constant(value) for value in values])
    assert 10 * np.log10(np.sum(in_float**2) / np.sum(noise**2)) > 25
    assert_kept(qat, values, tmp_path)


@pytest.mark.parametrize("read", [lambda seen: tf.roll(seen, 1, 1), tf.logical_not])
def test_another_mask_leaves_what_is_hidden(read):
    x, seen = keras.Input((SIZE,)), keras.Input((SIZE,), dtype="bool")
    hidden = tf.where(seen, layers.Dense(SIZE)(x), -1e9)
    model = keras.Model([x, seen], tf.where(read(seen), hidden, 0.0))
    qat = keras_qat.quantize_model(model)
    assert not any(isinstance(layer, MaskScores) for layer in qat._flatten_layers())


LATER = {
    "sum": lambda hidden, bias: bias + hidden,
    "difference": lambda hidden, bias: hidden - bias,
    "one for each row": lambda hidden, bias: hidden + bias[:, :1],
}


@pytest.mark.parametrize("mask", ["sum", "where", "infinite"])
@pytest.mark.parametrize("form", LATER)
@pytest.mark.sample(1)
def test_what_is_added_to_hidden_numbers_is_not_lost(form, mask):
    x, seen = keras.Input((SIZE,)), keras.Input((SIZE,))
    hidden = MASKS[mask](seen, layers.Dense(SIZE)(x), -1e9)
    masked = LATER[form](hidden, layers.Dense(SIZE)(x))
    above = masked - tf.reduce_max(masked, -1, keepdims=True)
    model, values = scramble(keras.Model([x, seen], tf.exp(above))), data()
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, values)
    in_float = model(values)
    noise = in_float - qat(values)
    assert 10 * np.log10(np.sum(in_float**2) / np.sum(noise**2)) > 25
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, values).identical == 1
