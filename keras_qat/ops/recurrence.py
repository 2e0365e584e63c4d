"""What a step of a GRU and of a SimpleRNN is made of, whatever computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from keras_qat.keras2.backend import keras
from keras_qat.ops.op import OWN, Attributes, OwnRange

__all__ = ["Machine", "Step", "columns", "gru_step", "inner_ranges", "simple_step", "step_of"]

_layers = keras.layers


class Machine(Protocol):
    """What computes steps. Values are its own; the last argument names the range of a result."""

    def dense(self, part: str, hidden: Any) -> Any:
        """The product of a hidden state with a part of the recurrent weights, and its bias."""

    def add(self, first: Any, second: Any, name: str, relu: bool = False) -> Any: ...
    def multiply(self, first: Any, second: Any, name: str) -> Any: ...
    def sigmoid(self, x: Any) -> Any: ...
    def tanh(self, x: Any) -> Any: ...
    def from_one(self, x: Any) -> Any:
        """1 - x."""

    def halves(self, x: Any) -> tuple[Any, Any]:
        """The first and the second half of the channels."""


Step = Callable[[Machine, Mapping[str, Any], Any], Any]
"""From the products of a step's input, by part, and the hidden state to the next one."""


def gru_step(m: Machine, given: Mapping[str, Any], hidden: Any, reset_after: bool) -> Any:
    """Two gates, z and r, and a candidate, of which z hidden + (1 - z) candidate is made."""
    gates = m.sigmoid(m.add(given["gates"], m.dense("gates", hidden), "gates"))
    keeps, resets = m.halves(gates)
    if reset_after:
        rest = m.multiply(resets, m.dense("candidate", hidden), "state_candidate")
    else:
        rest = m.dense("candidate", m.multiply(resets, hidden, "hidden"))
    candidate = m.tanh(m.add(given["candidate"], rest, "candidate"))
    kept = m.multiply(keeps, hidden, "hidden")
    return m.add(kept, m.multiply(m.from_one(keeps), candidate, "hidden"), "hidden")


def simple_step(m: Machine, given: Mapping[str, Any], hidden: Any, relu: bool) -> Any:
    """One sum, and tanh or ReLU of it."""
    fed_back = m.dense("sum", hidden)
    if relu:
        return m.add(given["sum"], fed_back, "hidden", relu=True)
    return m.tanh(m.add(given["sum"], fed_back, "sum"))


def step_of(attributes: Attributes) -> Step:
    """What a step of a layer with these attributes is."""
    if "relu" in attributes:
        return lambda m, given, hidden: simple_step(m, given, hidden, attributes["relu"])
    return lambda m, given, hidden: gru_step(m, given, hidden, attributes["reset_after"])


def columns(layer: Any) -> dict[str, slice]:
    """The parts of a layer's weights: columns of them."""
    units = layer.units
    if isinstance(layer, _layers.GRU):
        return {"gates": slice(0, 2 * units), "candidate": slice(2 * units, 3 * units)}
    return {"sum": slice(0, units)}


def inner_ranges(attributes: Attributes) -> dict[str, OwnRange]:
    """The ranges inside: of the products of inputs and states, and of their sums."""
    if attributes.get("relu"):
        return {"input_sum": OWN, "state_sum": OWN, "hidden": OwnRange(non_negative=True)}
    parts = ("sum",) if "relu" in attributes else ("gates", "candidate")
    return {f"{prefix}{part}": OWN for part in parts for prefix in ("input_", "state_", "")}
