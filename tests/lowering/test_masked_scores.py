"""Tests masks: reading masked values, and masks in variables that do not train."""

import pytest
import tensorflow as tf

import keras_qat
from keras_qat.helper_layers.operations import MaskScores
from tests.helpers import build_model, keras, layers
from tests.networks.forms.attention import VISIBLE, choosing
from tests.networks.forms.form import Form, decibels
from tests.networks.forms.masks import HELD_MASKS, SHAPE, SIZE, WITHIN, Attention, data, hidden


def model_of(mask, reader):
    return Form(hidden(mask, reader, -1e9), data()).model()


def test_infinity_that_is_read_has_no_range():
    model = model_of("infinite", lambda x: tf.maximum(x, tf.sin(x)))
    assert "tf.where" in str(keras_qat.plan(model))
    with pytest.raises(ValueError, match="infinity from this data, first in the output"):
        keras_qat.calibrate(keras_qat.quantize_model(model), [*data()])


READ = {
    "summed": lambda x: tf.reduce_sum(tf.concat([tf.nn.softmax(x), 1e-9 * x], -1), -1),
    "returned": lambda x: x,
    "larger of two": lambda x: tf.maximum(x, tf.sin(x)),
    "softmax of hidden above": lambda x: tf.nn.softmax(-x),
    "share of what is subtracted": lambda x: tf.sigmoid(x - tf.reduce_mean(x, -1, keepdims=True)),
}


@pytest.mark.parametrize("reader", READ)
def test_what_is_read_is_not_hidden(reader):
    qat = keras_qat.quantize_model(model_of("where", READ[reader]))
    assert not any(isinstance(layer, MaskScores) for layer in qat._flatten_layers())


@pytest.mark.parametrize("read", [lambda seen: tf.roll(seen, 1, 1), tf.logical_not])
def test_another_mask_leaves_what_is_hidden(read):
    x, seen = keras.Input((SIZE,)), keras.Input((SIZE,), dtype="bool")
    hidden = tf.where(seen, layers.Dense(SIZE)(x), -1e9)
    model = keras.Model([x, seen], tf.where(read(seen), hidden, 0.0))
    qat = keras_qat.quantize_model(model)
    assert not any(isinstance(layer, MaskScores) for layer in qat._flatten_layers())


ADDED = {
    "scores": lambda mask, scores: tf.where(mask > 0.5, 3.0 * mask + scores, -1e9),
    "a part": lambda mask, scores: tf.where(mask > 0.5, tf.zeros_like(scores), -1e9)[:, 1:2],
}


@pytest.mark.parametrize("name", ADDED)
def test_values_beside_a_mask_are_added(name):
    build = choosing(lambda mask, scores: scores + ADDED[name](mask, scores))
    model = Form(build, VISIBLE).model()
    qat = keras_qat.quantize_model(model)
    keras_qat.set_quantization(qat, False)
    assert decibels(model([*VISIBLE]), qat([*VISIBLE], training=True)) > 60


def test_another_mask_is_not_taken_for_the_one_before(monkeypatch):
    """A copy of a float model creates its masks again, with the user's code."""
    qat = keras_qat.quantize_model(build_model(SHAPE, Attention("truth")))
    monkeypatch.setitem(HELD_MASKS, "truth", (WITHIN[::-1], HELD_MASKS["truth"][1]))
    with pytest.raises(ValueError, match="Keras cannot copy the float model"):
        keras_qat.strip_quantization(qat)
