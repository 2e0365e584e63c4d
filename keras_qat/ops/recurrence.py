"""What a step of a recurrent layer is made of, whatever computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.ops.op import OWN, Attributes, OwnRange

__all__ = [
    "Machine",
    "Part",
    "States",
    "Step",
    "columns",
    "inner_ranges",
    "names_of_states",
    "parts",
    "step_of",
]

_layers = keras.layers


class Machine(Protocol):
    """What computes steps. Values are its own; the last argument names the range of a result."""

    def product(self, part: str, hidden: Any) -> Any:
        """The product of a hidden state with a part of the recurrent weights, and its bias."""

    def add(self, first: Any, second: Any, name: str, relu: bool = False) -> Any: ...
    def multiply(self, first: Any, second: Any, name: str) -> Any: ...
    def sigmoid(self, x: Any) -> Any: ...
    def tanh(self, x: Any) -> Any: ...
    def from_one(self, x: Any) -> Any:
        """1 - x."""

    def split(self, x: Any, count: int) -> list[Any]:
        """So many blocks of channels."""


States = tuple[Any, ...]
"""What a step leaves for the next one: first what the layer gives."""

Step = Callable[[Machine, Mapping[str, Any], States], States]
"""From the products of a step's input, by part, and the states to the next ones."""


def gru_step(m: Machine, given: Mapping[str, Any], states: States, reset_after: bool) -> States:
    """Two gates, z and r, and a candidate, of which z hidden + (1 - z) candidate is made."""
    (hidden,) = states
    gates = m.sigmoid(m.add(given["gates"], m.product("gates", hidden), "gates"))
    keeps, resets = m.split(gates, 2)
    if reset_after:
        rest = m.multiply(resets, m.product("candidate", hidden), "state_candidate")
    else:
        rest = m.product("candidate", m.multiply(resets, hidden, "hidden"))
    candidate = m.tanh(m.add(given["candidate"], rest, "candidate"))
    kept = m.multiply(keeps, hidden, "hidden")
    return (m.add(kept, m.multiply(m.from_one(keeps), candidate, "hidden"), "hidden"),)


def simple_step(m: Machine, given: Mapping[str, Any], states: States, relu: bool) -> States:
    """One sum, and tanh or ReLU of it."""
    fed_back = m.product("sum", *states)
    if relu:
        return (m.add(given["sum"], fed_back, "hidden", relu=True),)
    return (m.tanh(m.add(given["sum"], fed_back, "sum")),)


def step_of(attributes: Attributes) -> Step:
    """What a step of a layer with these attributes is."""
    if "relu" in attributes:
        return lambda m, given, states: simple_step(m, given, states, attributes["relu"])
    return lambda m, given, states: gru_step(m, given, states, attributes["reset_after"])


def names_of_states(attributes: Attributes) -> tuple[str, ...]:
    """The names of the states' ranges."""
    return ("hidden",)


class Part(NamedTuple):
    """A part of a layer's weights: blocks of columns."""

    blocks: tuple[slice, ...]


def parts(layer: Any) -> dict[str, Part]:
    """Those of a layer, by name."""

    def part(*places: int) -> Part:
        return Part(tuple(slice(at * layer.units, (at + 1) * layer.units) for at in places))

    if isinstance(layer, _layers.GRU):
        return {"gates": part(0, 1), "candidate": part(2)}
    return {"sum": part(0)}


def columns(x: Any, part: Part) -> Any:
    """Those of an array's or a tensor's columns that a part is made of."""
    found = [x[..., each] for each in part.blocks]
    if len(found) == 1:
        return found[0]
    return np.concatenate(found, -1) if isinstance(x, np.ndarray) else tf.concat(found, -1)


def inner_ranges(attributes: Attributes) -> dict[str, OwnRange]:
    """The ranges inside: of the products of inputs and states, and of their sums."""
    if attributes.get("relu"):
        return {"input_sum": OWN, "state_sum": OWN, "hidden": OwnRange(non_negative=True)}
    names = ("sum",) if "relu" in attributes else ("gates", "candidate")
    return {f"{prefix}{name}": OWN for name in names for prefix in ("input_", "state_", "")}
