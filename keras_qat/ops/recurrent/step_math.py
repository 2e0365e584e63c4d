"""What a step of a recurrent layer is made of, whatever computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from keras_qat.frontend.keras2.backend import keras
from keras_qat.ops.op import OWN, Attributes, OwnRange

_layers = keras.layers

CONV_LSTMS = (_layers.ConvLSTM1D, _layers.ConvLSTM2D)


class Machine(Protocol):
    """What computes steps. Values are its own; `name` is that of a result's range."""

    def product(self, part: str, hidden: Any) -> Any:
        """The product of a hidden state with a part of the recurrent weights, and its bias."""

    def add(self, first: Any, second: Any, name: str, maximum: float | None = None) -> Any:
        """A sum; with a maximum a ReLU of it that ends there, if not where its range does."""

    def multiply(self, first: Any, second: Any, name: str) -> Any: ...
    def sigmoid(self, x: Any, name: str) -> Any: ...
    def tanh(self, x: Any, name: str) -> Any: ...
    def from_one(self, x: Any) -> Any:
        """1 - x."""

    def split(self, x: Any, count: int) -> list[Any]:
        """So many blocks of channels."""


States = tuple[Any, ...]
"""What a step leaves for the next one: first what the layer gives."""

Step = Callable[[Machine, Mapping[str, Any], States], States]
"""From the products of a step's input, by part, and the states to the next ones."""


def _gates(m: Machine, given: Mapping[str, Any], hidden: Any, hard: bool, name: str) -> Any:
    """Sigmoids of sums. A hard one is no more than their range: its slope is in the weights."""
    fed_back = m.product("gates", hidden)
    if hard:
        return m.add(given["gates"], fed_back, name, maximum=1.0)
    return m.sigmoid(m.add(given["gates"], fed_back, "gates"), name)


def gru_step(
    m: Machine, given: Mapping[str, Any], states: States, reset_after: bool, hard: bool
) -> States:
    """Two gates, z and r, and a candidate, of which z hidden + (1 - z) candidate is made."""
    (hidden,) = states
    keeps, resets = m.split(_gates(m, given, hidden, hard, "sigmoid"), 2)
    if reset_after:
        rest = m.multiply(resets, m.product("candidate", hidden), "state_candidate")
    else:
        rest = m.product("candidate", m.multiply(resets, hidden, "hidden"))
    candidate = m.tanh(m.add(given["candidate"], rest, "candidate"), "hidden")
    kept = m.multiply(keeps, hidden, "hidden")
    return (m.add(kept, m.multiply(m.from_one(keeps), candidate, "hidden"), "hidden"),)


def lstm_step(m: Machine, given: Mapping[str, Any], states: States, hard: bool) -> States:
    """Gates i, f and o and a candidate: o tanh(c) of the cell state c = f c + i candidate.

    Between the products and the hidden state all is in 16 bits, as of TFLite's own LSTM.
    """
    hidden, cell = states
    takes, keeps, gives = m.split(_gates(m, given, hidden, hard, "unit"), 3)
    total = m.add(given["candidate"], m.product("candidate", hidden), "candidate")
    taken = m.multiply(takes, m.tanh(total, "unit"), "cell")
    cell = m.add(m.multiply(keeps, cell, "cell"), taken, "cell")
    return m.multiply(gives, m.tanh(cell, "unit"), "hidden"), cell


def simple_step(m: Machine, given: Mapping[str, Any], states: States, relu: bool) -> States:
    """One sum, and tanh or ReLU of it."""
    fed_back = m.product("sum", *states)
    if relu:
        return (m.add(given["sum"], fed_back, "hidden", maximum=np.inf),)
    return (m.tanh(m.add(given["sum"], fed_back, "sum"), "hidden"),)


def step_of(attributes: Attributes) -> Step:
    """What a step of a layer with these attributes is."""
    if "relu" in attributes:
        return lambda m, given, states: simple_step(m, given, states, attributes["relu"])
    hard = attributes["hard"]
    if "reset_after" in attributes:
        return lambda m, given, states: gru_step(m, given, states, attributes["reset_after"], hard)
    return lambda m, given, states: lstm_step(m, given, states, hard)


def names_of_states(attributes: Attributes) -> tuple[str, ...]:
    """The names of the states' ranges."""
    return ("hidden", "cell") if convolves(attributes) else ("hidden",)


def convolves(attributes: Attributes) -> bool:
    """Whether a layer's inputs and states are images, convolved with its weights."""
    return "padding" in attributes


HARD_SIGMOID = keras.activations.hard_sigmoid
"""0.2 (x + 2.5), from 0 to 1: that of Keras 2."""


class Part(NamedTuple):
    """A part of a layer's weights: blocks of columns.

    What is computed with them is slope * (product + offset), which kernels compute along: the
    slope is in scales, the offset in the bias of inputs.
    """

    blocks: tuple[slice, ...]
    slope: float = 1.0
    offset: float = 0.0


def parts(layer: Any) -> dict[str, Part]:
    """Those of a layer, by name."""
    is_image = isinstance(layer, CONV_LSTMS)
    units = layer.filters if is_image else layer.units

    def block(first: int, count: int = 1) -> slice:
        return slice(first * units, (first + count) * units)

    if isinstance(layer, _layers.SimpleRNN):
        return {"sum": Part((block(0),))}
    gates = (block(0), block(1), block(3)) if is_image else (block(0, 2),)
    line = (0.2, 2.5) if layer.recurrent_activation is HARD_SIGMOID else (1.0, 0.0)
    return {"gates": Part(gates, *line), "candidate": Part((block(2),))}


def offsets(layer: Any) -> np.ndarray:
    """The offset of each column, in real numbers."""
    found = {
        each.start: (each, part.offset) for part in parts(layer).values() for each in part.blocks
    }
    return np.concatenate(
        [np.full(each.stop - each.start, offset) for _, (each, offset) in sorted(found.items())]
    )


def columns(x: Any, part: Part) -> Any:
    """Those of an array's or a tensor's columns that a part is made of."""
    found = [x[..., each] for each in part.blocks]
    if len(found) == 1:
        return found[0]
    return np.concatenate(found, -1) if isinstance(x, np.ndarray) else tf.concat(found, -1)


def inner_ranges(attributes: Attributes) -> dict[str, OwnRange]:
    """The ranges inside that are observed: of the products of inputs and states, and their sums.

    Sums in 16 bits have fixed ones. Products that are brought to 16 bits have the zero point 0.
    """
    if attributes.get("relu"):
        return {"input_sum": OWN, "state_sum": OWN, "hidden": OwnRange(non_negative=True)}
    names = ("sum",) if "relu" in attributes else ("gates", "candidate")
    if convolves(attributes):
        symmetric = OwnRange(symmetric=True)
        return {f"{prefix}{name}": symmetric for name in names for prefix in ("input_", "state_")}
    found = {f"{prefix}{name}": OWN for name in names for prefix in ("input_", "state_", "")}
    if attributes.get("hard"):
        del found["gates"]
    return found
