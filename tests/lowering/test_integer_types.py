"""Operations on whole numbers: of int64, as NumPy makes constants, and what converters lack."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_kept
from tests.helpers import images

STEPS = np.arange(4)[None]
FORMS = {
    "tile": lambda x: tf.tile(STEPS, [tf.shape(x)[0], 1]),
    "broadcast_to": lambda x: tf.broadcast_to(tf.constant(STEPS), [tf.shape(x)[0], 4]),
    "repeat": lambda x: tf.repeat(STEPS, tf.shape(x)[0], axis=0),
    "gather": lambda x: tf.gather(STEPS[0, ::-1], tf.argsort(x)),
    "fill": lambda x: tf.fill([tf.shape(x)[0], 4], np.int64(3)),
    "where": lambda x: tf.where(x > 0, STEPS[0], np.int64(2)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, tmp_path):
    keras.utils.set_random_seed(1)
    inputs, x = keras.Input((4,)), images(16, (4,))
    y = keras.layers.Dense(4)(inputs)
    model = keras.Model(inputs, tf.one_hot(FORMS[form](y), 4)[:, 1] + y)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    assert np.abs(qat(x) - model(x)).mean() < 0.02
    assert_kept(qat, x, tmp_path)


OF_POSITIONS = {
    "clip_by_value": lambda x: tf.clip_by_value(x, tf.zeros([], tf.int32), 6),
    "relu6": tf.nn.relu6,
    "relu6 behind another": lambda x: tf.nn.relu6(tf.nn.relu6(x) + 1),
    "matmul": lambda x: 2 + tf.reshape(tf.matmul(x[..., None], tf.ones((1, 2), tf.int32)), (-1, 8)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", OF_POSITIONS)
def test_positions(form, tmp_path):
    """Of up to 6, for which TFLite's converter makes a ReLU6 of integers, and repeated ones."""
    keras.utils.set_random_seed(1)
    inputs, x = keras.Input((4,), dtype="int32"), np.arange(64, dtype=np.int32).reshape(16, 4)
    positions = OF_POSITIONS[form](inputs % 12 - 2)
    model = keras.Model(inputs, keras.layers.Embedding(12, 2)(positions))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    assert np.abs(qat(x) - model(x)).max() < 0.01
    assert_kept(qat, x, tmp_path)
