"""Files of models as `tf.contrib.quantize` trains them: ranges that no quantizer has."""

from __future__ import annotations

import pytest

import keras_qat
from keras_qat.frontend.keras2.backend import keras
from tests.comparison import KERNELS, assert_identical
from tests.helpers import images, observe, scramble

layers = keras.layers


def network():
    """Fixed ranges, of the input where values only move, and joined ones."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu6")(inputs)
    parts = [layers.Activation(name)(layers.Conv2D(3, 1)(x)) for name in ("sigmoid", "tanh")]
    x = layers.Concatenate()([layers.MaxPooling2D()(x), *map(layers.AveragePooling2D(), parts)])
    return keras.Model(inputs, layers.Softmax()(layers.Dense(3)(layers.Flatten()(x))))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", KERNELS)
def test_simulations_compute_what_files_do(kernels):
    x = images(16, (8, 8, 3))
    qat = observe(keras_qat.quantize_model(scramble(network()), "contrib"), x)
    contents = keras_qat.export_tflite(qat, input_range=(-4.0, 4.0))
    assert_identical(qat, x, kernels, contents, input_range=(-4.0, 4.0))
