"""Sentences of a made-up language, judged by a small transformer."""

from __future__ import annotations

from typing import Any

import numpy as np

import keras_qat
from benchmarks.tasks.signals import accuracy
from benchmarks.tasks.task import Data, Remedy, Task
from keras_qat.keras2.backend import keras, layers

WORDS, LENGTH, WIDTH = 40, 16, 24
NOT, VERY = 38, 39
"""Words 0 to 9 praise, 10 to 19 blame, others say nothing; these two change what follows."""


def sentences(numbers: np.random.Generator, train: int, test: int) -> Data:
    """Makes sentences with the sign of their sum of praise and blame, where that is not zero."""
    x: list[np.ndarray] = []
    y: list[int] = []
    while len(x) < train + test:
        words = numbers.choice(WORDS, LENGTH, p=_CHANCES)
        worth = np.where(words < 10, 1, np.where(words < 20, -1, 0))
        before = np.concatenate([[-1], words[:-1]])
        total = np.sum(worth * np.where(before == NOT, -1, np.where(before == VERY, 2, 1)))
        if total:
            x.append(words)
            y.append(int(total > 0))
    tokens, truth = np.array(x, np.float32), np.array(y)
    return Data(tokens[:train], truth[:train], tokens[train:], truth[train:])


_CHANCES = np.array([0.25 / 20] * 20 + [0.35 / 18] * 18 + [0.2, 0.2])


def transformer() -> Any:
    """Makes a transformer of one block."""
    tokens = keras.Input((LENGTH,))
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    x = layers.Conv1D(WIDTH, 2, padding="causal", activation="relu")(x)
    attended = layers.MultiHeadAttention(2, WIDTH // 2)(x, x)
    x = layers.LayerNormalization()(layers.Add()([x, attended]))
    wide = layers.Dense(2 * WIDTH, activation="relu")(x)
    x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(WIDTH)(wide)]))
    return keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def _norms_in_integers(model: Any) -> Any:
    recipe = keras_qat.recipes.int8().override("LayerNormalization", quantize=True)
    return keras_qat.quantize_model(model, recipe)


TASKS = {
    "text": Task(
        "text, transformer",
        sentences,
        transformer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        accuracy,
        counts=(1536, 512),
        epochs=(12, 3),
        remedies={"norms in integers": Remedy(_norms_in_integers)},
    )
}
