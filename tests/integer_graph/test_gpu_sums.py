"""Sums as they are computed where there is a GPU, on the CPU."""

from __future__ import annotations

import numpy as np

import keras_qat
from keras_qat.frontend.keras2.backend import keras
from keras_qat.ops import weighted_sums
from tests.helpers import rng

layers = keras.layers


def test_wide_convolutions_are_added_up_in_float64(monkeypatch):
    image = keras.Input((6, 6, 4))
    x = layers.Conv2D(5, 1)(layers.DepthwiseConv2D(3)(layers.Conv2D(4, 3)(image)))
    x_train = rng().normal(size=(8, 6, 6, 4)).astype(np.float32)
    qat = keras_qat.quantize_model(keras.Model(image, x))
    keras_qat.calibrate(qat, x_train)
    before = qat.predict(x_train, verbose=0)
    asked = []
    monkeypatch.setattr(weighted_sums, "has_gpu", lambda: asked.append(1) or True)
    qat.kernels = "xnnpack"  # Inference is made anew.
    np.testing.assert_array_equal(qat.predict(x_train, verbose=0), before)
    assert asked
