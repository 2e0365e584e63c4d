"""What several operations compute, in layers that are called several times."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_kept
from tests.helpers import images

layers = keras.layers
pytestmark = pytest.mark.legacy


class HardSwish(layers.Layer):
    def call(self, x):
        return x * tf.nn.relu6(x + 3.0) / 6.0


class Softmax(layers.Layer):
    def call(self, x):
        shares = tf.exp(x - tf.reduce_max(x, axis=-1, keepdims=True))
        return shares / tf.reduce_sum(shares, axis=-1, keepdims=True)


class Causal(layers.Layer):
    def call(self, x):
        steps = x.shape[1]
        return tf.nn.softmax(x + (1 - np.tri(steps, 4, dtype=np.float32)) * -1e9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [HardSwish, Softmax, Causal])
@pytest.mark.parametrize("steps", [(4, 4, 4), (4, 2, 4)])
def test_in_integers(kind, steps, tmp_path):
    inputs, x = keras.Input((4, 4)), images(8, (4, 4))
    shared, hidden = kind(name="shared"), inputs
    for index, count in enumerate(steps):
        hidden = layers.Dense(4, name=f"dense_{index}")(hidden)[:, :count]
        hidden = shared(hidden) if index == 0 else layers.Concatenate(1)([shared(hidden), inputs])
    qat = keras_qat.quantize_model(keras.Model(inputs, hidden), strict=True)
    keras_qat.calibrate(qat, x)
    assert_kept(qat, x, tmp_path)
