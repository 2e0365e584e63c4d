"""Embeddings, with which the nearest example is searched."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from benchmarks.digit_networks import data
from benchmarks.verdicts.cases import Case, broken, calibrated, exported, healthy, train
from keras_qat import recipes
from keras_qat.keras2.backend import keras

layers = keras.layers


@functools.cache
def embedder(normalizes: bool) -> Any:
    """A network of vectors with 16 entries, trained by the classes that follow from them."""
    keras.utils.set_random_seed(0)
    image = keras.Input((16, 16, 1), name="image")
    x = layers.Conv2D(16, 3, 2, activation="relu")(image)
    x = layers.Flatten()(layers.Conv2D(32, 3, 2, activation="relu")(x))
    vector = layers.Dense(16, name="vector")(x)
    if normalizes:
        vector = layers.UnitNormalization(name="unit")(vector)
    scores = layers.Dense(10)(12 * vector if normalizes else vector)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train(keras.Model(image, scores), data().x_train, data().y_train, loss, 10)
    return keras.Model(image, vector)


def embedded(images: np.ndarray, normalizes: bool = True, recipe: Any = "int8") -> Case:
    """Returns the network of vectors with ranges from images."""
    qat = calibrated(embedder(normalizes), images, recipe)
    return exported(qat, data().x_test, data().y_test)


def with_outlier(value: float) -> np.ndarray:
    """Returns images of which one has a bright pixel."""
    images = data().x_train[:200].copy()
    images[0, 0, 0] = value
    return images


healthy("vectors of length 1", "rules")(lambda: embedded(data().x_train[:200]))
broken("vectors of length 1, an outlier", "rules")(lambda: embedded(with_outlier(500.0)))
broken("vectors of length 1, 2 bits", "rules")(
    lambda: embedded(data().x_train[:200], recipe=recipes.low_bits(2, 2))
)
healthy("vectors of any length", "test")(lambda: embedded(data().x_train[:200], False))
broken("vectors of any length, 0..255", "test")(lambda: embedded(255 * data().x_train[:200], False))
broken("vectors of any length, 2 bits", "test")(
    lambda: embedded(data().x_train[:200], False, recipes.low_bits(2, 2, end_bits=None))
)
