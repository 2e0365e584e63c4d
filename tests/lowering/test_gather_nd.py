"""`tf.gather_nd` in layers of one's own."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import images

layers = keras.layers
SHAPE = (4, 3, 2)


def with_examples(x, rows, columns):
    batch = tf.shape(x)[0]
    examples = tf.tile(tf.reshape(tf.range(batch), (batch, 1)), (1, 5))
    return tf.gather_nd(x, tf.stack([examples, rows, columns], -1))


def in_one_tensor(x, rows, columns):
    return tf.gather_nd(x, tf.concat([rows[..., None], columns[..., None]], -1), batch_dims=1)


def single_numbers(x, rows, columns):
    batch, indices = tf.shape(x)[0], [rows, columns, tf.minimum(rows, 1)]
    examples = tf.repeat(tf.range(batch)[:, None], 5, axis=1)
    return tf.gather_nd(params=x, indices=tf.stack([examples, *indices], axis=2))


def rows_alone(x, rows, columns):
    return tf.gather_nd(x, rows[..., None], batch_dims=1)


def of_others(x, rows, columns):
    batch = tf.shape(x)[0]
    others = tf.tile(tf.range(batch)[::-1, None], (1, 5))
    return tf.gather_nd(x, tf.stack([others, rows, columns], -1))


def model_of(function):
    class Own(layers.Layer):
        def call(self, inputs):
            return function(*inputs)

    inputs = [
        keras.Input(SHAPE),
        keras.Input((5,), dtype="int32"),
        keras.Input((5,), dtype="int32"),
    ]
    return keras.Model(inputs, Own(name="own")(inputs))


@pytest.mark.sample(1)
@pytest.mark.legacy
@pytest.mark.parametrize("function", [with_examples, in_one_tensor, single_numbers, rows_alone])
def test_within_an_example(function, tmp_path):
    draw = np.random.default_rng(1)
    x = [images(8, SHAPE), draw.integers(0, 4, (8, 5)), draw.integers(0, 3, (8, 5))]
    x = [x[0], *(numbers.astype(np.int32) for numbers in x[1:])]
    model = model_of(function)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    np.testing.assert_allclose(qat(x), model(x), atol=0.02)
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, x).identical == 1
    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == contents


def test_of_other_examples_stays_in_float():
    assert keras_qat.plan(model_of(of_others)).float_layers
