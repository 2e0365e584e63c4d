"""What the verdict is asked about: quantized models, their files, and examples with labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

import keras_qat
from keras_qat.analysis.verify.verdict import GOOD, POOR
from keras_qat.keras2.backend import keras

Part = Literal["digits", "rules", "test", "fresh"]
"""Where a model is from: the digits that the limits of 0.3.0 were found with; models that today's
rules were found with; or models that were looked at once, when the rules were fixed."""


class Case(NamedTuple):
    """A quantization-aware model, its file, and examples with labels."""

    model: Any
    file: bytes
    x: Any
    y: Any


class Entry(NamedTuple):
    """A case with the verdict that is right.

    Args:
        truth: the words of the verdict.
        make: makes the case.
        part: where it is from.
        is_announced: whether something has to be said of it, although it is good.
    """

    truth: str
    make: Callable[[], Case]
    part: Part
    is_announced: bool = False


CASES: dict[str, Entry] = {}
"""Name -> case."""

Maker = Callable[[], Case]


def healthy(name: str, part: Part, is_announced: bool = False) -> Callable[[Maker], Maker]:
    """Registers a case that does what its float model does."""

    def register(make: Maker) -> Maker:
        CASES[name] = Entry(GOOD, make, part, is_announced)
        return make

    return register


def broken(name: str, part: Part, truth: str = POOR) -> Callable[[Maker], Maker]:
    """Registers a case that was broken on purpose."""

    def register(make: Maker) -> Maker:
        CASES[name] = Entry(truth, make, part)
        return make

    return register


def calibrated(model: Any, data: Any, recipe: Any = "int8", **options: Any) -> Any:
    """Returns the quantization-aware model with ranges from data."""
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.calibrate(qat, data, **options)
    return qat


def train(
    model: Any, x: Any, y: Any, loss: Any, epochs: int = 12, rate: float = 5e-3, batch: int = 32
) -> Any:
    """Trains a model."""
    count = len(x[0]) if isinstance(x, list) else len(x)
    steps = epochs * -(-count // batch)
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(keras.optimizers.Adam(schedule), loss)
    model.fit(x, y, batch, epochs, verbose=0)
    return model


def exported(qat: Any, x: Any, y: Any, file_of: Any = None, **options: Any) -> Case:
    """Returns the model with its file, or with the file of another model."""
    return Case(qat, keras_qat.export_tflite(file_of or qat, **options), x, y)


class Split(NamedTuple):
    """Data for training, and for the verdict."""

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any


def split(x: np.ndarray, y: Any, test: int = 400) -> Split:
    """Splits examples and labels, of which there may be several in a dict."""
    if isinstance(y, dict):
        there = {key: part[:-test] for key, part in y.items()}
        here = {key: part[-test:] for key, part in y.items()}
        return Split(x[:-test], there, x[-test:], here)
    return Split(x[:-test], y[:-test], x[-test:], y[-test:])
