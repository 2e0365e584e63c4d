"""Positions that are computed from float values: in integers for targets without float."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import keras, layers, quantize_on
from tests.networks.forms.indices import FORMS, INTEGER


def test_whole_numbers_that_are_added_are_no_quantized_values():
    """A sum of 8 bits holds 2.98 for 3, of which a cast made 2."""
    x, steps = keras.Input((4,)), np.arange(256.0, dtype=np.float32).reshape(64, 4) / 4
    numbers = tf.cast(tf.floor(layers.ReLU()(x)) + 7.0, INTEGER)
    model = keras.Model(x, tf.one_hot(numbers, 72))
    qat = quantize_on(model, steps, target="ethos_u55")
    np.testing.assert_array_equal(np.argmax(qat(steps), -1), np.argmax(model(steps), -1))
    with pytest.warns(UserWarning, match="ONE_HOT: no kernel"):
        contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, steps).identical == 1


def test_runtimes_with_float_compute_them_in_float():
    form = FORMS["float positions"]["the next one"]
    model = form.model()
    plan = keras_qat.plan(model)
    assert any("Positions" in reason for reason in plan.float_layers.values())
    x = form.inputs(model)
    qat = quantize_on(model, x)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


def test_tokens_among_real_numbers_keep_their_values():
    """A range of 8 bits would move them: they stay in float."""
    x = keras.Input((4,))
    tokens = tf.cast(x[:, 0], INTEGER)
    model = keras.Model(x, layers.Embedding(12, 3)(tokens) * layers.Dense(3)(x[:, 1:]))
    assert "Positions" not in str(keras_qat.plan(model, target="ethos_u55"))
