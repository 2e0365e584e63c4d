"""Constants that a tensor is limited by, which may lie beyond all of its values."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_kept

layers = keras.layers
EACH = np.array([1.0, 0.2, -1.0, 3.0], np.float32)

LIMITED = {
    "all below": lambda x: tf.maximum(x, 1.0),
    "all above": lambda x: tf.minimum(-0.5, x),
    "clipped": lambda x: tf.clip_by_value(x, 0.8, 2.0),
    "one for each channel": lambda x: tf.maximum(x, EACH) + tf.minimum(x, EACH),
    "beyond a fixed range": lambda x: tf.maximum(tf.sigmoid(x), 1.5),
    "within a fixed range": lambda x: tf.maximum(tf.sigmoid(x), 0.6),
    "norms": lambda x: tf.clip_by_norm(x, 9.0, [1]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LIMITED)
def test_results_are_the_constant(name, tmp_path):
    x = np.random.default_rng(0).uniform(0.1, 0.5, (16, 4)).astype(np.float32)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Lambda(LIMITED[name])(inputs))
    expected = model.predict(x, verbose=0)
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, x)
    step = np.abs(expected).max() / 128
    np.testing.assert_allclose(qat.predict(x, verbose=0), expected, atol=2 * step)
    assert_kept(qat, x, tmp_path)
