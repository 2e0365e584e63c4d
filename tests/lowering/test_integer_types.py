"""Constants of int64, as NumPy makes them, in operations that take their type."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.frontend.keras2.backend import keras
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


@pytest.mark.sample(2)
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
