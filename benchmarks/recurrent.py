"""Recurrent networks in int8 against float, on three tasks, a few seeds each.

    python -m benchmarks.recurrent                       # all, some minutes on two cores
    python -m benchmarks.recurrent --tasks words --networks GRU --seeds 1

`digits`: scikit-learn's digits, 8 steps of 8 pixels. `words`: the language of a word from its
letters, of the word lists of Debian (packages wamerican, wngerman, wfrench, witalian, wspanish);
letters have no accents, and words of several languages are left out. `squares`: in which of eight
directions a square of 3x3 pixels moves, in noise, over 8 images of 12x12. A network is trained in
float, then calibrated; and trained further in float, or quantized, with the same steps and rates.
Accuracies of quantized networks are those of their files in LiteRT.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter

layers = keras.layers

LISTS = Path("/usr/share/dict")
LANGUAGES = ("american-english", "ngerman", "french", "italian", "spanish")
LETTERS, STEPS = 26, 12
TRAIN, TEST = 3000, 1000
"""Words of each language."""

Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Inputs and labels to train with, and to test with."""


def digits() -> Data:
    """Rows of the digits as steps."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = (data.images / 16).astype(np.float32)
    return x[:1200], data.target[:1200], x[1200:], data.target[1200:]


def plain(word: str) -> str:
    """Small letters without accents."""
    apart = unicodedata.normalize("NFD", word.strip().lower().replace("ß", "ss"))
    return "".join(item for item in apart if not unicodedata.combining(item))


def words() -> Data:
    """Letters from 1 to 26, the last one at the end; 0 in front of them."""
    lists = []
    for language in LANGUAGES:
        text = (LISTS / language).read_text("utf-8")
        result = {plain(word) for word in text.split()}
        fits = {item for item in result if item.isascii() and item.isalpha() and len(item) >= 4}
        lists.append({fit for fit in fits if len(fit) <= STEPS})
    numbers = np.random.default_rng(0)
    x, labels = [], []
    for label, own in enumerate(lists):
        others = set().union(*(item for item in lists if item is not own))
        chosen = numbers.choice(sorted(own - others), TRAIN + TEST, replace=False)
        x.append([[ord(item) - 96 for item in word.rjust(STEPS, "`")] for word in chosen])
        labels.append([label] * (TRAIN + TEST))
    inputs, targets = np.array(x, np.int32), np.array(labels)
    parts = inputs[:, :TRAIN], targets[:, :TRAIN], inputs[:, TRAIN:], targets[:, TRAIN:]
    first, second, third, fourth = (part.reshape(-1, *part.shape[2:]) for part in parts)
    return first, second, third, fourth


def squares(count: int = 3000, steps: int = 8, size: int = 12) -> Data:
    """Squares that come in again where they leave, a third of the sequences to test with."""
    numbers = np.random.default_rng(0)
    labels = numbers.integers(0, 8, count)
    speed = numbers.uniform(0.5, 1.2, (count, 1))
    way = np.stack([np.sin(labels * np.pi / 4), np.cos(labels * np.pi / 4)], 1) * speed
    places = (
        numbers.uniform(0, size, (count, 2))[:, None] + way[:, None] * np.arange(steps)[:, None]
    )
    corners = (places % size).astype(int)
    x = numbers.normal(0, 0.05, (count, steps, size, size, 1)).astype(np.float32)
    example, step = np.ogrid[:count, :steps]
    for row in range(3):
        for column in range(3):
            where = (corners[..., 0] + row) % size, (corners[..., 1] + column) % size
            x[example, step, where[0], where[1], 0] += 0.8
    last = count // 3
    return x[last:], labels[last:], x[:last], labels[:last]


TASKS: dict[str, Callable[[], Data]] = {"digits": digits, "words": words, "squares": squares}
EPOCHS = {"digits": (40, 10), "words": (12, 4), "squares": (12, 4)}
"""In float, and further."""

NETWORKS: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: layers.LSTM(32),
    "GRU": lambda: layers.GRU(32),
    "GRU, reset before": lambda: layers.GRU(32, reset_after=False),
    "SimpleRNN": lambda: layers.SimpleRNN(32),
    "SimpleRNN, ReLU": lambda: layers.SimpleRNN(32, activation="relu"),
    "Bidirectional LSTM": lambda: layers.Bidirectional(layers.LSTM(16)),
    "Bidirectional GRU": lambda: layers.Bidirectional(layers.GRU(16)),
}

_images = functools.partial(layers.ConvLSTM2D, 8, 3, padding="same")

OF_IMAGES: dict[str, Callable[[], Any]] = {
    "ConvLSTM2D": lambda: _images(),
    "ConvLSTM2D, sigmoid": lambda: _images(recurrent_activation="sigmoid"),
}
"""Those for squares."""

ROWS = ("float", "calibrated", "float, further", "quantized, further")


def network(task: str, make: Callable[[], Any]) -> Any:
    """A small classifier around a recurrent layer."""
    if task == "squares":
        inputs = keras.Input((8, 12, 12, 1))
        pooled = layers.GlobalAveragePooling2D()(make()(inputs))
        return keras.Model(inputs, layers.Dense(8)(pooled))
    if task == "digits":
        x = inputs = keras.Input((8, 8))
        classes = 10
    else:
        inputs = keras.Input((STEPS,), dtype="int32")
        x, classes = layers.Embedding(LETTERS + 1, 16)(inputs), len(LANGUAGES)
    return keras.Model(inputs, layers.Dense(classes)(make()(x)))


def trained(model: Any, data: Data, epochs: int, rate: float) -> Any:
    """The model after some epochs."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)
    model.fit(data[0], data[1], 64, epochs, verbose=0)
    return model


def accuracy(outputs: np.ndarray, data: Data) -> float:
    return 100 * float(np.mean(outputs.argmax(-1) == data[3]))


def of_file(qat: Any, data: Data) -> float:
    """The accuracy of the file in LiteRT."""
    model = FileInterpreter(keras_qat.export_tflite(qat))
    (codes,) = model.run({qat.input_names[0]: data[2]}).values()
    return accuracy(codes, data)


def measured(task: str, make: Callable[[], Any], data: Data, seed: int) -> dict[str, float]:
    """An accuracy for each row."""
    keras.utils.set_random_seed(seed)
    first, further = EPOCHS[task]
    model = trained(network(task, make), data, first, 2e-3)
    result = {"float": accuracy(model.predict(data[2], verbose=0), data)}
    qat = keras_qat.quantize_model(model)
    if in_float := keras_qat.plan(model).float_layers:
        print(in_float)
    keras_qat.calibrate(qat, data[0][:1000])
    result["calibrated"] = of_file(qat, data)
    keras.utils.set_random_seed(seed)
    result["quantized, further"] = of_file(trained(qat, data, further, 5e-4), data)
    keras.utils.set_random_seed(seed)
    trained(model, data, further, 5e-4)
    result["float, further"] = accuracy(model.predict(data[2], verbose=0), data)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--networks", nargs="+", choices={**NETWORKS, **OF_IMAGES})
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(f"| task | network | {' | '.join(ROWS)} |")
    print("| --- | --- |" + " --- |" * len(ROWS))
    for task in args.tasks:
        data = TASKS[task]()
        networks = OF_IMAGES if task == "squares" else NETWORKS
        for name in [item for item in networks if item in (args.networks or networks)]:
            seeds = [measured(task, networks[name], data, seed) for seed in range(args.seeds)]
            cells = []
            for row in ROWS:
                values = [seed[row] for seed in seeds]
                each = ", ".join(f"{value:.1f}" for value in values)
                cells.append(f"{statistics.mean(values):.1f} ({each})")
            print(f"| {task} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
