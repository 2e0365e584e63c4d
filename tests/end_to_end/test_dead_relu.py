"""A ReLU that training has switched off: all that its quantizer has seen are zeros."""

from __future__ import annotations

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import export
from tests.helpers import images
from tests.networks.small import layers

pytestmark = pytest.mark.legacy


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["int8", "int16x8", "contrib"])
def test_the_rest_of_the_model_is_exported(recipe):
    keras.utils.set_random_seed(1)
    x = keras.Input((6,))
    off = keras.initializers.Constant(-100.0)
    dead = layers.Dense(3, activation="relu", bias_initializer=off)(x)
    y = layers.Dense(4)(layers.Concatenate()([layers.Dense(5)(x), layers.Dense(2)(dead)]))
    exported = export(keras.Model(x, y), images(64, (6,)), recipe=recipe)
    assert exported.report.identical >= (0.9 if recipe == "contrib" else 1)


def test_quantizers_without_data_are_told():
    with pytest.raises(ValueError, match="have seen no data yet"):
        keras_qat.export_tflite(
            keras_qat.quantize_model(
                keras.Sequential([keras.Input((4,)), layers.Dense(2, activation="relu")])
            )
        )


def test_training_goes_on():
    x = keras.Input((6,))
    off = keras.initializers.Constant(-100.0)
    y = layers.Dense(2)(layers.Dense(3, activation="relu", bias_initializer=off)(x))
    qat = keras_qat.quantize_model(keras.Model(x, y))
    qat.compile("sgd", "mse")
    data = images(32, (6,))
    history = qat.fit(data, data[:, :2], epochs=3, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    assert np.all(np.isfinite(qat.predict(data, verbose=0)))
