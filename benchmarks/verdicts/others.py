"""Pairs, points, key points, colors, textures and letters: tasks that no rule was found with."""

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
def points() -> Split:
    """Sets of twelve points, and the area that they span."""
    r = np.random.default_rng(0)
    x = r.normal(size=(2000, 12, 2)) * r.uniform(0.3, 1, (2000, 1, 2))
    area = np.prod(x.max(1) - x.min(1), -1) / 4
    return split(x.astype(np.float32), area.astype(np.float32))


@functools.cache
def area(is_dead: bool = False) -> Any:
    """A network of sets: the same layers for each point, and the largest of what they return."""
    keras.utils.set_random_seed(0)
    x = keras.Input((12, 2), name="points")
    hidden = layers.Dense(48, "relu")(layers.Dense(48, "relu")(x))
    hidden = layers.Dense(32, "relu", name="hidden")(layers.GlobalMaxPooling1D()(hidden))
    model = keras.Model(x, layers.Dense(1, name="area")(hidden))
    train(model, points().x_train, points().y_train, "mse", 10)
    if is_dead:
        kernel, bias = model.get_layer("hidden").get_weights()
        model.get_layer("hidden").set_weights([kernel, bias - 100])
    return model


def spanned(factor: float = 1.0, is_dead: bool = False) -> Case:
    """Returns the network of points with ranges from scaled points."""
    qat = calibrated(area(is_dead), factor * points().x_train[:200])
    return exported(qat, points().x_test, points().y_test)


healthy("area of points", "fresh")(spanned)
broken("area of points, in centimetres", "fresh")(lambda: spanned(100.0))
broken("area of points, a dead layer", "fresh")(lambda: spanned(is_dead=True))


@functools.cache
def pairs() -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray], np.ndarray]:
    """Pairs of digits, and whether both are the same."""
    r = np.random.default_rng(1)
    data = digit_data()
    result: list[Any] = []
    for images, classes, count in (
        (data.x_train, data.y_train, 3000),
        (data.x_test, data.y_test, 500),
    ):
        first = r.integers(0, len(images), count)
        order = np.argsort(classes, kind="stable")
        same = order[np.searchsorted(classes[order], classes[first]) + r.integers(0, 20, count)]
        second = np.where(r.random(count) < 0.5, same, r.integers(0, len(images), count))
        result += [[images[first], images[second]], (classes[first] == classes[second]).astype(int)]
    return tuple(result)


@functools.cache
def comparer() -> Any:
    """The same network for both images, and a sigmoid of their difference."""
    keras.utils.set_random_seed(0)
    image = keras.Input((16, 16, 1))
    x = layers.Conv2D(16, 3, 2, activation="relu")(image)
    x = layers.Dense(32)(layers.Flatten()(layers.Conv2D(24, 3, 2, activation="relu")(x)))
    inner = keras.Model(image, x)
    ends = [keras.Input((16, 16, 1), name=name) for name in ("left", "right")]
    a, b = map(inner, ends)
    difference = layers.Subtract()([a, b])
    hidden = layers.Dense(16, "relu")(layers.Multiply()([difference, difference]))
    model = keras.Model(ends, layers.Dense(1, "sigmoid", name="same")(hidden))
    return train(model, *pairs()[:2], "binary_crossentropy", 6)


def compared(factor: float = 1.0) -> Case:
    """Returns the comparer with ranges from pairs, of which the right image is scaled."""
    (left, right), _, x, y = pairs()
    qat = calibrated(comparer(), [left[:200], factor * right[:200]])
    return exported(qat, x, y)


healthy("pairs of digits", "fresh")(compared)
broken("pairs of digits, one in bytes", "fresh")(lambda: compared(255.0))


@functools.cache
def spots() -> Split:
    """Images with noise and a spot, and a map that is 1 there."""
    r = np.random.default_rng(2)
    place = r.uniform(2, 14, (1500, 2))
    grid = np.stack(np.meshgrid(np.arange(16), np.arange(16), indexing="ij"), -1)
    distance = np.square(grid[None] - place[:, None, None]).sum(-1)
    x = np.exp(-distance / 3) * r.uniform(0.8, 1.5, (1500, 1, 1)) + 0.3 * r.normal(
        size=distance.shape
    )
    heat = np.exp(-distance / 6)
    return split(x.astype(np.float32)[..., None], heat.astype(np.float32)[..., None])


@functools.cache
def finder() -> Any:
    """Convolutions that return a map."""
    keras.utils.set_random_seed(0)
    x = keras.Input((16, 16, 1), name="image")
    hidden = layers.Conv2D(12, 5, padding="same", activation="relu")(x)
    hidden = layers.Conv2D(12, 5, padding="same", activation="relu")(hidden)
    model = keras.Model(x, layers.Conv2D(1, 5, padding="same", name="heat")(hidden))
    return train(model, spots().x_train, spots().y_train, "mse", 5)


def pointed(images: np.ndarray) -> Case:
    """Returns the network of maps with ranges from images."""
    return exported(calibrated(finder(), images), spots().x_test, spots().y_test)


healthy("heat maps", "fresh")(lambda: pointed(spots().x_train[:200]))
broken("heat maps, pale images", "fresh")(lambda: pointed(0.2 * spots().x_train[:200]))


@functools.cache
def colors() -> Split:
    """Patches of a color, and how warm it is."""
    r = np.random.default_rng(3)
    color = r.uniform(0, 1, (1500, 1, 1, 3))
    x = np.clip(color + 0.1 * r.normal(size=(1500, 8, 8, 3)), 0, 1)
    red, green, blue = color[:, 0, 0].T
    return split(x.astype(np.float32), np.float32(red - blue + 0.3 * np.sin(6 * green)))


@functools.cache
def thermometer() -> Any:
    """Convolutions with one linear entry."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8, 3), name="patch")
    hidden = layers.Conv2D(16, 3, 2, activation="relu", name="first")(x)
    hidden = layers.GlobalAveragePooling2D()(layers.Conv2D(24, 1, activation="relu")(hidden))
    model = keras.Model(x, layers.Dense(1, name="warmth")(layers.Dense(16, "relu")(hidden)))
    return train(model, colors().x_train, colors().y_train, "mae", 12)


def warm(is_swapped: bool = False, recipe: Any = "int8") -> Case:
    """Returns the network of colors, perhaps with a file for images whose channels are swapped."""
    x = colors().x_train[:200]
    qat = calibrated(thermometer(), x, recipe)
    other = None
    if is_swapped:
        model = keras.models.clone_model(thermometer())
        model.set_weights(thermometer().get_weights())
        kernel, bias = model.get_layer("first").get_weights()
        model.get_layer("first").set_weights([kernel[:, :, ::-1], bias])
        other = calibrated(model, x)
    return exported(qat, colors().x_test, colors().y_test, other)


healthy("warmth of colors", "fresh")(warm)
broken("warmth of colors, file with swapped channels", "fresh", OTHER)(lambda: warm(True))
broken("warmth of colors, 2 bits", "fresh")(
    lambda: warm(recipe=recipes.low_bits(2, 2, end_bits=None))
)


@functools.cache
def textures() -> Split:
    """Images of four textures, and which is where."""
    r = np.random.default_rng(4)
    rows, columns = np.mgrid[:16, :16]
    patterns = np.stack(
        [rows % 2, columns % 2, (rows + columns) % 2, (rows // 2 + columns // 2) % 2]
    )
    small = r.integers(0, 4, (700, 2, 2))
    where = small.repeat(8, 1).repeat(8, 2)
    x = np.take_along_axis(patterns[None], where[:, None], 1)[:, 0]
    x = x + 0.6 * r.normal(size=x.shape)
    return split(x.astype(np.float32)[..., None], where, 200)


@functools.cache
def weaver() -> Any:
    """Convolutions with a softmax for each pixel."""
    keras.utils.set_random_seed(0)
    x = keras.Input((16, 16, 1), name="image")
    hidden = layers.Conv2D(16, 5, padding="same", activation="relu")(x)
    hidden = layers.Conv2D(16, 5, padding="same", activation="relu")(hidden)
    model = keras.Model(x, layers.Conv2D(4, 1, activation="softmax", name="texture")(hidden))
    loss = "sparse_categorical_crossentropy"
    return train(model, textures().x_train, textures().y_train, loss, 6)


def woven(images: np.ndarray) -> Case:
    """Returns the network of textures with ranges from images."""
    return exported(calibrated(weaver(), images), textures().x_test, textures().y_test)


healthy("textures", "fresh")(lambda: woven(textures().x_train[:200]))


@broken("textures, missing pixels are -9999", "fresh")
def _() -> Case:
    images = textures().x_train[:200].copy()
    images[:, 3, 3] = -9999.0
    return woven(images)


@functools.cache
def letters() -> Split:
    """Texts of a random grammar, and the next letter at each place."""
    r = np.random.default_rng(5)
    chances = r.dirichlet(np.full(24, 0.15), (24,)).cumsum(-1)
    text = [0]
    for draw in r.random(24_000):
        text.append(min(int(np.searchsorted(chances[text[-1]], draw)), 23))
    windows = np.array(text[:24_000]).reshape(-1, 16)
    return split(windows[:, :-1].astype(np.int32), windows[:, 1:], 300)


@functools.cache
def writer(epochs: int = 8) -> Any:
    """An LSTM that says what comes next: it can't know."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((15,), dtype="int32", name="letters")
    x = layers.LSTM(24, return_sequences=True)(layers.Embedding(24, 12)(tokens))
    model = keras.Model(tokens, layers.Dense(24, name="next")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return train(model, letters().x_train, letters().y_train, loss, epochs)


def written(factor: float = 1.0, file_of: Any = None) -> Case:
    """Returns the LSTM, perhaps with weights that were scaled after the ranges were found."""
    x = letters().x_train[:200]
    qat = calibrated(writer(), x)
    if factor != 1:
        for variable in qat.weights:
            if variable.name.endswith("next/kernel:0"):
                variable.assign(factor * variable)
    other = None if file_of is None else calibrated(file_of, x)
    return exported(qat, letters().x_test, letters().y_test, other)


healthy("next letters, LSTM", "fresh")(written)
broken("next letters, LSTM, file of an earlier epoch", "fresh", OTHER)(
    lambda: written(file_of=writer(4))
)
broken("next letters, LSTM, weights changed after calibration", "fresh")(lambda: written(30.0))
