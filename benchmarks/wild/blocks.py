"""What several networks written by hand are made of."""

from __future__ import annotations

from typing import Any

from keras_qat.keras2.backend import keras

__all__ = ["conv"]

layers: Any = keras.layers


def conv(x: Any, filters: int, size: Any = 3, strides: Any = 1, activation: Any = "relu") -> Any:
    """Convolution, BatchNormalization, activation."""
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    return layers.Activation(activation)(x)
