"""Networks that return images, masks or boxes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from benchmarks.digit_networks import data as digit_data
from benchmarks.verdicts.cases import (
    Case,
    Split,
    broken,
    calibrated,
    exported,
    healthy,
    split,
    train,
)
from keras_qat import recipes
from keras_qat.analysis.verify.verdict import OTHER
from keras_qat.keras2.backend import keras

layers = keras.layers


@functools.cache
def all_images() -> tuple[np.ndarray, np.ndarray]:
    """The digits and their classes, training examples first."""
    data = digit_data()
    return (
        np.concatenate([data.x_train, data.x_test]),
        np.concatenate([data.y_train, data.y_test]),
    )


@functools.cache
def noisy() -> Split:
    """Digits with much noise, and without."""
    clean = all_images()[0]
    noise = np.random.default_rng(0).normal(size=clean.shape)
    return split((clean + 0.5 * noise).astype(np.float32), clean)


def net(out: int, activation: Any = None, name: str = "out") -> Any:
    """A small network from image to image."""
    image = keras.Input((16, 16, 1), name="image")
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    x = layers.Conv2D(24, 3, 2, padding="same", activation="relu")(x)
    x = layers.Conv2D(24, 3, padding="same", activation="relu")(x)
    x = layers.UpSampling2D(2)(x)
    return keras.Model(
        image, layers.Conv2D(out, 3, padding="same", activation=activation, name=name)(x)
    )


@functools.cache
def denoiser(seed: int = 0) -> Any:
    """A network that removes noise."""
    keras.utils.set_random_seed(seed)
    return train(net(1), noisy().x_train, noisy().y_train, "mse", 5)


def cleaned(images: np.ndarray, recipe: Any = "int8") -> Case:
    """Returns the denoiser with ranges from images."""
    return exported(calibrated(denoiser(), images, recipe), noisy().x_test, noisy().y_test)


healthy("denoiser", "rules")(lambda: cleaned(noisy().x_train[:200]))


@healthy("denoiser, 4 bits, fine-tuned", "rules")
def _() -> Case:
    qat = calibrated(denoiser(), noisy().x_train[:200], recipes.low_bits(4, 4), method="mse")
    train(qat, noisy().x_train, noisy().y_train, "mse", 4, 1e-3)
    return exported(qat, noisy().x_test, noisy().y_test)


broken("denoiser, data of a tenth", "rules")(lambda: cleaned(0.1 * noisy().x_train[:200]))
broken("denoiser, data times 100", "rules")(lambda: cleaned(100 * noisy().x_train[:200]))


@functools.cache
def scenes() -> Split:
    """Small digits in large dark images, and which pixels they cover."""
    r = np.random.default_rng(1)
    digits = all_images()[0][:, ::2, ::2]
    x = np.zeros((len(digits), 16, 16, 1), np.float32)
    for scene, digit in zip(x, digits, strict=True):
        top, left = r.integers(0, 9, 2)
        scene[top : top + 8, left : left + 8] = digit
    mask = (x > 0.3).astype(int)
    return split((x + 0.15 * r.normal(size=x.shape)).astype(np.float32), mask)


@functools.cache
def masker() -> Any:
    """A network of masks, with a sigmoid."""
    keras.utils.set_random_seed(0)
    model = net(1, "sigmoid", "mask")
    return train(model, scenes().x_train, scenes().y_train, "binary_crossentropy", 5)


@healthy("masks", "rules")
def _() -> Case:
    qat = calibrated(masker(), scenes().x_train[:200])
    return exported(qat, scenes().x_test, scenes().y_test)


@broken("masks, an outlier", "rules")
def _() -> Case:
    x = scenes().x_train[:200].copy()
    x[0, 0, 0] = 1000.0
    return exported(calibrated(masker(), x), scenes().x_test, scenes().y_test)


@functools.cache
def enlarged() -> Any:
    """A network that doubles the size of an image."""
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(24, 3, padding="same", activation="relu")(image)
    x = layers.Conv2DTranspose(24, 3, 2, padding="same", activation="relu")(x)
    model = keras.Model(image, layers.Conv2D(1, 3, padding="same", name="large")(x))
    x = smooth()
    return train(model, x[:1300, ::2, ::2], x[:1300], "mae", 8)


@functools.cache
def smooth() -> np.ndarray:
    """The digits without the edges of their pixels."""
    x = all_images()[0]
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), "edge")
    result = np.zeros_like(x)
    for i, row in enumerate((0.25, 0.5, 0.25)):
        for j, column in enumerate((0.25, 0.5, 0.25)):
            result += row * column * padded[:, i : i + 16, j : j + 16]
    return result


def large(recipe: Any = "int8", factor: float = 1.0) -> Case:
    """Returns the network that enlarges, with ranges from scaled images."""
    x = smooth()
    qat = calibrated(enlarged(), factor * x[:200, ::2, ::2], recipe)
    return exported(qat, x[1300:, ::2, ::2], x[1300:])


healthy("super-resolution", "test")(large)
broken("super-resolution, 3 bits", "test")(lambda: large(recipes.low_bits(3, 3)))
broken("super-resolution, pale data", "test")(lambda: large(factor=0.2))


@functools.cache
def boxed() -> Split:
    """Digits somewhere in an image: where, and which."""
    r = np.random.default_rng(2)
    images, classes = all_images()
    digits = images[:, ::2, ::2]
    x = np.zeros((len(digits), 16, 16, 1), np.float32)
    boxes = np.zeros((len(digits), 4), np.float32)
    for scene, digit, box in zip(x, digits, boxes, strict=True):
        top, left = r.integers(0, 9, 2)
        scene[top : top + 8, left : left + 8] = digit
        box[:] = np.array([top, left, top + 8, left + 8]) / 16
    return split(x, {"box": boxes, "digit": classes})


@functools.cache
def detector() -> Any:
    """A network with a box and a class."""
    keras.utils.set_random_seed(0)
    image = keras.Input((16, 16, 1), name="image")
    x = layers.Conv2D(24, 3, 2, padding="same", activation="relu")(image)
    x = layers.Conv2D(48, 3, 2, padding="same", activation="relu")(x)
    x = layers.Dense(96, "relu")(layers.Flatten()(x))
    heads = {
        "box": layers.Dense(4, name="box")(x),
        "digit": layers.Dense(10, name="digit")(layers.Dense(48, "relu")(x)),
    }
    losses = {
        "box": "huber",
        "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }
    return train(keras.Model(image, heads), boxed().x_train, boxed().y_train, losses, 20)


def found(images: np.ndarray) -> Case:
    """Returns the detector with ranges from images."""
    return exported(calibrated(detector(), images), boxed().x_test, boxed().y_test)


healthy("detector", "test")(lambda: found(boxed().x_train[:200]))
broken("detector, calibrated with 0..255", "test")(lambda: found(255 * boxed().x_train[:200]))


@functools.cache
def copier(seed: int = 0) -> Any:
    """An autoencoder with a sigmoid, trained with the binary loss."""
    keras.utils.set_random_seed(seed)
    x = all_images()[0]
    return train(net(1, "sigmoid", "copy"), x[:1300], x[:1300], "binary_crossentropy", 4)


def copied(images: np.ndarray, file_of: Any = None) -> Case:
    """Returns the autoencoder with ranges from images."""
    x = all_images()[0]
    other = None if file_of is None else calibrated(file_of, images)
    return exported(calibrated(copier(), images), x[1300:], x[1300:], other)


healthy("autoencoder with a sigmoid", "test")(lambda: copied(all_images()[0][:200]))
broken("autoencoder, file of another seed", "test", OTHER)(
    lambda: copied(all_images()[0][:200], copier(1))
)
