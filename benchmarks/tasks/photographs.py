"""Super-resolution of photographs that scikit-learn ships: trained on one, tested on the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.tasks.shapes import IN_16_BITS
from benchmarks.tasks.task import Data, Task
from keras_qat.keras2.backend import keras, layers

PATCH = 32


def patches(numbers: np.random.Generator, image: np.ndarray, count: int) -> np.ndarray:
    """Returns patches of the brightness of a photograph, at random places, in 0 to 1."""
    grey = image.mean(-1) / 255
    places = numbers.integers(0, np.array(grey.shape) - PATCH, (count, 2))
    return np.stack([grey[r : r + PATCH, c : c + PATCH] for r, c in places]).astype(np.float32)


def photograph_data(numbers: np.random.Generator, train: int, test: int) -> Data:
    """Makes patches of half the size, as the mean of four pixels, to be made twice as large."""
    from sklearn.datasets import load_sample_images

    china, flower = load_sample_images().images
    large = np.concatenate([patches(numbers, china, train), patches(numbers, flower, test)])
    small = large.reshape(-1, PATCH // 2, 2, PATCH // 2, 2).mean((2, 4))
    x, y = small[..., None], large[..., None]
    return Data(x[:train], y[:train], x[train:], y[train:])


def network() -> Any:
    """Makes convolutions, and pixels of channels, that add to the picture made larger."""
    small = keras.Input((PATCH // 2, PATCH // 2, 1))
    x = layers.Conv2D(16, 5, padding="same", activation="relu")(small)
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    details = tf.nn.depth_to_space(layers.Conv2D(4, 3, padding="same")(x), 2)
    return keras.Model(small, layers.Add()([layers.UpSampling2D()(small), details]))


def psnr(outputs: np.ndarray, data: Data) -> dict[str, float]:
    """Peak signal to noise ratio in dB."""
    error = np.mean((outputs.clip(0, 1) - data.y_test) ** 2)
    return {"PSNR": -10 * float(np.log10(error))}


TASKS = {
    "super-resolution": Task(
        "super-resolution by 2",
        photograph_data,
        network,
        "mse",
        psnr,
        counts=(768, 192),
        epochs=(16, 4),
        remedies={"int16x8": IN_16_BITS},
    )
}
