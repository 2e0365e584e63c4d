"""States that recurrent layers with `stateful=True` keep from one call to the next.

They are the variables of Keras' layers. Float32 holds every integer state of a TFLite kernel, so
training, inference and `reset_states` share the variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import list_layers


def states_of(model: Any) -> list[Any]:
    """Returns the variables that hold the states of a model."""
    layers = [layer for layer in list_layers(model) if isinstance(layer, keras.layers.RNN)]
    return [state for rnn in layers if rnn.stateful for state in tf.nest.flatten(rnn.states)]


def kept_batch(states: Sequence[Any]) -> int | None:
    """Returns how many sequences a model keeps its states of; None without states."""
    return int(states[0].shape[0]) if states else None


def keep_states(layer: Any, states: Sequence[Any]) -> None:
    """Assigns the states after the last step to a layer's variables."""
    for variable, state in zip(layer.states, states, strict=True):
        variable.assign(tf.cast(state, variable.dtype))


class Stream:
    """A separate set of states for a model, which starts at zeros.

    Within `with stream:` the model has the states of the stream, afterwards its own again.

    Args:
        states: the model's variables.
    """

    def __init__(self, states: Sequence[Any]) -> None:
        self._variables = states
        self._others = [tf.zeros_like(state) for state in self._variables]

    def _swap(self) -> None:
        current = [tf.identity(state) for state in self._variables]
        for variable, value in zip(self._variables, self._others, strict=True):
            variable.assign(value)
        self._others = current

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *error: Any) -> None:
        self._swap()


@contextlib.contextmanager
def unchanged(states: list[Any]) -> Iterator[None]:
    """Runs a block, possibly a traced one, and restores states afterwards."""
    before = [tf.identity(state) for state in states]
    try:
        yield
    finally:
        for variable, value in zip(states, before, strict=True):
            variable.assign(value)
