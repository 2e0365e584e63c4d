"""What a task consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Data(NamedTuple):
    """Examples to train on and examples to score: inputs, and what `Task.score` compares with."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: Any


def as_they_are(*outputs: np.ndarray) -> np.ndarray:
    """Returns the one output of a file that gives what the model gives."""
    (output,) = outputs
    return output


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A way to close the gap that plain int8 leaves.

    Args:
        quantize: makes the quantization-aware model of the float one.
        decode: makes what the model gives of the file's outputs.
    """

    quantize: Callable[[Any], Any]
    decode: Callable[..., np.ndarray] = as_they_are


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: its data, network and metric.

    Args:
        title: what is done, in a few words.
        data: makes the data; takes a random generator and the counts of examples to train on and
            to score.
        model: makes the float network.
        loss: its loss.
        score: returns figures by name from outputs for the test's inputs; higher is better.
        counts: examples to train on, and to score.
        epochs: of the float model, and of training on.
        rate: learning rate of Adam; training on begins with a third of it.
        remedies: ways to close the gap of int8, by name.
    """

    title: str
    data: Callable[[np.random.Generator, int, int], Data]
    model: Callable[[], Any]
    loss: Any
    score: Callable[[np.ndarray, Data], dict[str, float]]
    counts: tuple[int, int]
    epochs: tuple[int, int]
    rate: float = 3e-3
    remedies: Mapping[str, Remedy] = dataclasses.field(default_factory=dict)
