"""States that recurrent layers keep from one call to the next: those with `stateful=True`.

They are the variables that Keras' layers have. Kernels' states in integers are real numbers that
float32 holds, so training, inference and `reset_states` share them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_qat.frontend.graph import layers_in
from keras_qat.frontend.keras2.backend import keras

__all__ = ["Stream", "keep_states", "kept_batch", "states_of", "unchanged"]


def states_of(model: Any) -> list[Any]:
    """The variables with states that a model keeps."""
    layers = [each for each in layers_in(model) if isinstance(each, keras.layers.RNN)]
    return [state for each in layers if each.stateful for state in tf.nest.flatten(each.states)]


def kept_batch(states: Sequence[Any]) -> int | None:
    """Returns how many sequences a model keeps these states of; None without states."""
    return int(states[0].shape[0]) if states else None


def keep_states(layer: Any, states: Sequence[Any]) -> None:
    """Writes what a layer's last step gave into its own variables."""
    for variable, state in zip(layer.states, states, strict=True):
        variable.assign(tf.cast(state, variable.dtype))


class Stream:
    """States of its own, zeros to begin with, for one of several runs of a model's layers.

    Inside of `with stream:` the model has these states, afterwards the ones it had before.

    Args:
        states: the model's variables.
    """

    def __init__(self, states: Sequence[Any]) -> None:
        self._variables = states
        self._others = [tf.zeros_like(each) for each in self._variables]

    def _swap(self) -> None:
        now = [tf.identity(each) for each in self._variables]
        for variable, value in zip(self._variables, self._others, strict=True):
            variable.assign(value)
        self._others = now

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *error: Any) -> None:
        self._swap()


@contextlib.contextmanager
def unchanged(states: list[Any]) -> Iterator[None]:
    """Runs a block, also one that is traced, behind which states are what they were before."""
    before = [tf.identity(each) for each in states]
    try:
        yield
    finally:
        for variable, value in zip(states, before, strict=True):
            variable.assign(value)
