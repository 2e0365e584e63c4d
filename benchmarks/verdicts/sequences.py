"""Recurrent networks, attention, and signals that networks continue or clean."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

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
def shapes() -> Split:
    """Waves of four shapes, with noise, and their shapes."""
    r = np.random.default_rng(0)
    kinds = r.integers(0, 4, 1600)
    time = np.arange(32)
    phase = r.uniform(0, 1, (len(kinds), 1)) + time * r.uniform(0.06, 0.14, (len(kinds), 1))
    waves = [
        np.sin(2 * np.pi * phase),
        np.sign(np.sin(2 * np.pi * phase)),
        2 * (phase % 1) - 1,
        4 * np.abs(phase % 1 - 0.5) - 1,
    ]
    x = np.choose(kinds[:, None], waves) + 0.15 * r.normal(size=phase.shape)
    return split(x.astype(np.float32)[..., None], kinds)


@functools.cache
def lstm(seed: int = 0) -> Any:
    """An LSTM with four scores."""
    keras.utils.set_random_seed(seed)
    x = keras.Input((32, 1), name="signal")
    model = keras.Model(x, layers.Dense(4, name="shape")(layers.LSTM(24)(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return train(model, shapes().x_train, shapes().y_train, loss, 20, 1e-2)


def shape(waves: np.ndarray, recipe: Any = "int8", file_of: Any = None) -> Case:
    """Returns the LSTM with ranges from waves."""
    other = None if file_of is None else calibrated(file_of, waves)
    return exported(calibrated(lstm(), waves, recipe), shapes().x_test, shapes().y_test, other)


healthy("wave shapes, LSTM", "rules")(lambda: shape(shapes().x_train[:200]))
broken("wave shapes, LSTM, in millivolts", "rules")(lambda: shape(1000 * shapes().x_train[:200]))
broken("wave shapes, LSTM, quiet waves", "rules")(lambda: shape(0.05 * shapes().x_train[:200]))
broken("wave shapes, LSTM, file of another seed", "rules", OTHER)(
    lambda: shape(shapes().x_train[:200], file_of=lstm(1))
)


@functools.cache
def load() -> Split:
    """The load of a grid over two days, and its next four hours."""
    r = np.random.default_rng(1)
    time = np.arange(6000)
    y = np.sin(time * np.pi / 12) + 0.4 * np.sin(time * np.pi / 84) + 0.2 * r.normal(size=6000)
    windows = np.lib.stride_tricks.sliding_window_view(y, 52)[::3].astype(np.float32)
    return split(windows[:, :48, None], windows[:, 48:])


@functools.cache
def gru() -> Any:
    """A GRU that continues a series."""
    keras.utils.set_random_seed(0)
    x = keras.Input((48, 1), name="signal")
    model = keras.Model(x, layers.Dense(4, name="next")(layers.GRU(24)(x)))
    return train(model, load().x_train, load().y_train, "mse", 6)


def ahead(series: np.ndarray, recipe: Any = "int8", loss: Any = "mse") -> Case:
    """Returns the GRU with ranges from series."""
    qat = calibrated(gru(), series, recipe)
    if loss:
        qat.compile("adam", loss)
    return exported(qat, load().x_test, load().y_test)


healthy("load of a grid, GRU", "rules")(lambda: ahead(load().x_train[:200]))
healthy("load of a grid, GRU, not compiled", "rules")(
    lambda: ahead(load().x_train[:200], loss=None)
)
broken("load of a grid, GRU, in megawatts", "rules")(lambda: ahead(500 * load().x_train[:200]))


@broken("load of a grid, GRU, a spike", "rules")
def _() -> Case:
    series = load().x_train[:200].copy()
    series[0, 0] = 200.0
    return ahead(series)


class Memory(keras.layers.Layer):
    """A cell with a fixed linear memory, as that of an LMU, and a small state beside it."""

    def __init__(self, order: int = 8, units: int = 16, **options: Any) -> None:
        super().__init__(**options)
        self.order, self.units = order, units
        self.state_size, self.output_size = [order, units], units
        index = np.arange(order)
        a = np.where(index[:, None] < index, -1.0, (-1.0) ** (index[:, None] - index + 1))
        step = 1 / 32
        transition = np.eye(order) + step * a * (2 * index + 1)[:, None]
        self.transition = transition.T.astype(np.float32)
        self.entry = (step * (2 * index + 1) * (-1.0) ** index)[None].astype(np.float32)

    def build(self, shape: Any) -> None:
        """Makes the layers."""
        self.encode = layers.Dense(1, use_bias=False)
        self.mix = layers.Dense(self.units, "tanh")
        super().build(shape)

    def call(self, x: Any, states: Any) -> Any:
        """Computes a step."""
        memory, hidden = states
        memory = memory @ self.transition + self.encode(x) @ self.entry
        hidden = self.mix(keras.backend.concatenate([x, hidden, memory]))
        return hidden, [memory, hidden]

    def get_config(self) -> dict[str, Any]:
        """Returns what makes the same cell."""
        return {**super().get_config(), "order": self.order, "units": self.units}


@functools.cache
def lmu() -> Any:
    """The memory, with four scores."""
    keras.utils.set_random_seed(0)
    x = keras.Input((32, 1), name="signal")
    model = keras.Model(x, layers.Dense(4, "softmax", name="shape")(layers.RNN(Memory())(x)))
    loss = "sparse_categorical_crossentropy"
    return train(model, shapes().x_train, shapes().y_train, loss, 15, 1e-2)


def remembered(waves: np.ndarray, recipe: Any = "int8") -> Case:
    """Returns the network of the memory with ranges from waves."""
    return exported(calibrated(lmu(), waves, recipe), shapes().x_test, shapes().y_test)


broken("wave shapes, linear memory, 3 points lost", "test")(
    lambda: remembered(shapes().x_train[:200])
)


@healthy("wave shapes, linear memory, fine-tuned", "test")
def _() -> Case:
    qat = calibrated(lmu(), shapes().x_train[:200])
    loss = "sparse_categorical_crossentropy"
    train(qat, shapes().x_train, shapes().y_train, loss, 10, 1e-3)
    return exported(qat, shapes().x_test, shapes().y_test)


broken("wave shapes, linear memory, loud waves", "test")(
    lambda: remembered(60 * shapes().x_train[:200])
)


@functools.cache
def words() -> Split:
    """Sentences of 20 words at most: the tag of each word depends on the word before it."""
    r = np.random.default_rng(2)
    x = r.integers(1, 30, (1600, 20))
    length = r.integers(6, 21, (len(x), 1))
    before = np.pad(x[:, :-1], ((0, 0), (1, 0)))
    tags = (x % 3 + before % 2 * 3) % 5
    is_there = np.arange(20) < length
    return split((x * is_there).astype(np.int32), np.where(is_there, tags, -1))


@functools.cache
def tagger() -> Any:
    """Attention of each word to those before it, behind an embedding with a mask."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((20,), dtype="int32", name="tokens")
    x = layers.Embedding(30, 24, mask_zero=True)(tokens)
    places = layers.Embedding(20, 24)(np.arange(20)[None])
    x = layers.Add()([x, places])
    x = layers.Concatenate()([x, layers.MultiHeadAttention(2, 16)(x, x, use_causal_mask=True)])
    x = layers.Dense(64, "relu")(x)
    model = keras.Model(tokens, layers.Dense(5, name="tags")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    return train(model, words().x_train, words().y_train, loss, 15)


def tagged(sentences: np.ndarray, recipe: Any = "int8") -> Case:
    """Returns the tagger with ranges from sentences."""
    return exported(calibrated(tagger(), sentences, recipe), words().x_test, words().y_test)


healthy("tags of words, attention", "test")(lambda: tagged(words().x_train[:200]))
broken("tags of words, attention, 2 bits", "test")(
    lambda: tagged(words().x_train[:200], recipes.low_bits(2, 2, end_bits=None))
)


@functools.cache
def mood() -> Split:
    """Sentences, and whether their good words outnumber the bad ones."""
    x = np.concatenate([words().x_train, words().x_test])
    worth = np.where(x == 0, 0, np.where(x % 2 == 0, 1, -1)).sum(1)
    return split(x, (worth > 0).astype(int))


@functools.cache
def reader(mask: bool = True) -> Any:
    """A GRU over words."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((20,), dtype="int32", name="tokens")
    x = layers.GRU(16)(layers.Embedding(30, 12, mask_zero=mask, name="words")(tokens))
    model = keras.Model(tokens, layers.Dense(1, "sigmoid", name="good")(x))
    return train(model, mood().x_train, mood().y_train, "binary_crossentropy", 8)


def read(recipe: Any = "int8") -> Case:
    """Returns the reader."""
    return exported(
        calibrated(reader(), mood().x_train[:200], recipe), mood().x_test, mood().y_test
    )


healthy("mood of sentences, GRU", "test")(read)
broken("mood of sentences, GRU, 2 bits", "test")(
    lambda: read(recipes.low_bits(2, 2, end_bits=None))
)


@broken("mood of sentences, file without the mask", "test", OTHER)
def _() -> Case:
    plain = reader(False)
    plain.set_weights(reader().get_weights())
    x = mood().x_train[:200]
    return exported(calibrated(reader(), x), mood().x_test, mood().y_test, calibrated(plain, x))


@functools.cache
def hum() -> Split:
    """Voices with the hum of the mains, and without."""
    r = np.random.default_rng(3)
    time = np.arange(128)
    shape = (1400, 1)
    voice = np.zeros((1400, 128))
    for _ in range(3):
        phase = time * r.uniform(0.05, 0.4, shape) + r.uniform(0, 6, shape)
        voice += r.uniform(0.2, 1, shape) * np.sin(phase)
    x = voice + 0.6 * np.sin(1.3 * time + r.uniform(0, 6, shape)) + 0.2 * r.normal(size=voice.shape)
    return split(x.astype(np.float32)[..., None], voice.astype(np.float32)[..., None])


@functools.cache
def cleaner() -> Any:
    """Convolutions that add to their input."""
    keras.utils.set_random_seed(0)
    x = keras.Input((128, 1), name="signal")
    hidden = layers.Conv1D(24, 9, padding="same", activation="relu")(x)
    hidden = layers.Conv1D(24, 9, padding="same", activation="relu")(hidden)
    model = keras.Model(x, layers.Add()([x, layers.Conv1D(1, 9, padding="same")(hidden)]))
    return train(model, hum().x_train, hum().y_train, "mse", 6)


def hushed(signals: np.ndarray) -> Case:
    """Returns the network that removes the hum, with ranges from signals."""
    return exported(calibrated(cleaner(), signals), hum().x_test, hum().y_test)


healthy("voices without hum", "rules")(lambda: hushed(hum().x_train[:200]))
broken("voices without hum, quiet voices", "rules")(lambda: hushed(0.25 * hum().x_train[:200]))
