"""Attention end to end: `predict` is the file, code for code."""

from __future__ import annotations

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import rng

layers = keras.layers


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
def test_many_softmaxes(kernels):
    """One in half a million codes was another one, as a graph took the reciprocal of the sum."""
    inputs = keras.Input((4, 16, 16))
    x = (2 * rng(0).normal(size=(2048, 4, 16, 16))).astype(np.float32)
    qat = keras_qat.quantize_model(keras.Model(inputs, layers.Softmax()(inputs)))
    keras_qat.calibrate(qat, x[:64])
    qat.kernels = kernels
    (expected,) = keras_qat.simulate(qat, x, kernels, batch_size=256).outputs.values()
    predicted = qat.predict(x, batch_size=256, verbose=0)
    np.testing.assert_array_equal(predicted, expected.values)
