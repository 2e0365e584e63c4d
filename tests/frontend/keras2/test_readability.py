"""Models that cannot be read are refused, and the message says what to do."""

from __future__ import annotations

import pytest

import keras_qat
from keras_qat.frontend.keras2.backend import keras
from tests.networks.small import layers

pytestmark = pytest.mark.legacy


def test_subclassed_model():
    class Custom(keras.Model):
        def __init__(self):
            super().__init__(name="custom")
            self.dense = layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

    with pytest.raises(ValueError, match=r"'custom' is a subclassed model.*inputs=keras.Input"):
        keras_qat.quantize_model(Custom())


def test_unbuilt_sequential():
    model = keras.Sequential([layers.Dense(2)], name="unbuilt")
    with pytest.raises(ValueError, match=r"'unbuilt' has no input shape yet.*keras\.Input"):
        keras_qat.quantize_model(model)
    model.build((None, 3))
    keras_qat.quantize_model(model)


@pytest.mark.parametrize("model", [None, "model.h5", layers.Dense(2)])
def test_no_model(model):
    with pytest.raises(ValueError, match=r"Expected a Keras model, got \w+"):
        keras_qat.quantize_model(model)
