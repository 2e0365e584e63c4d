"""Defines one step of a recurrent layer. Training and integer inference share this code.

The columns of a layer's weights are divided into *sections*. Those of LSTM and GRU are "gates",
with sigmoid, and "candidate", with tanh. SimpleRNN has only one section, "sum".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, multiply_sizes
from keras_qat.keras2.backend import keras, layers
from keras_qat.ops.op import OWN, Attributes, OwnRange

CONV_LSTMS = (layers.ConvLSTM1D, layers.ConvLSTM2D)


class Arithmetic(Protocol):
    """The operations of a step. Training implements them in float, `step_ops` in integers.

    The argument `part` is the name of a section. Results with the same `name` share a range.
    """

    def product(self, part: str, hidden: Any) -> Any:
        """Multiplies a hidden state by the recurrent weights of a section, and adds the bias."""

    def add(self, first: Any, second: Any, name: str, maximum: float | None = None) -> Any:
        """Adds two values. Then applies a ReLU with the given `maximum`. None means no ReLU."""

    def multiply(self, first: Any, second: Any, name: str) -> Any: ...
    def sigmoid(self, x: Any, name: str) -> Any: ...
    def tanh(self, x: Any, name: str) -> Any: ...
    def subtract_from_one(self, x: Any) -> Any: ...

    def split(self, x: Any, count: int) -> list[Any]:
        """Splits `x` into `count` blocks of channels."""


States = tuple[Any, ...]
"""The states after a step, (hidden,) or (hidden, cell). The hidden state is also the output."""

Step = Callable[[Arithmetic, Mapping[str, Any], States], States]
"""A function that computes the states after a step from the states before it. The second argument
maps each section to the product of the step's input and the weights."""


def _gates(m: Arithmetic, inputs: Mapping[str, Any], hidden: Any, hard: bool, name: str) -> Any:
    """Compute the gates: sigmoid(input product + state product).

    For a hard sigmoid, the sum is only clipped. The weights already include slope and offset.
    """
    fed_back = m.product("gates", hidden)
    if hard:
        return m.add(inputs["gates"], fed_back, name, maximum=1.0)
    return m.sigmoid(m.add(inputs["gates"], fed_back, "gates"), name)


def gru_step(
    m: Arithmetic, inputs: Mapping[str, Any], states: States, reset_after: bool, hard: bool
) -> States:
    """Computes a step of a GRU: z * hidden + (1 - z) * candidate, with gates z and r."""
    (hidden,) = states
    keeps, resets = m.split(_gates(m, inputs, hidden, hard, "sigmoid"), 2)
    if reset_after:
        rest = m.multiply(resets, m.product("candidate", hidden), "state_candidate")
    else:
        rest = m.product("candidate", m.multiply(resets, hidden, "hidden"))
    candidate = m.tanh(m.add(inputs["candidate"], rest, "candidate"), "hidden")
    remains = m.multiply(keeps, hidden, "hidden")
    return (m.add(remains, m.multiply(m.subtract_from_one(keeps), candidate, "hidden"), "hidden"),)


def lstm_step(m: Arithmetic, inputs: Mapping[str, Any], states: States, hard: bool) -> States:
    """Computes a step of an LSTM. Returns (o * tanh(c), c), with c = f * c + i * candidate.

    As in TFLite's LSTM, intermediate results have 16 bits.
    """
    hidden, cell = states
    accepts, keeps, outputs = m.split(_gates(m, inputs, hidden, hard, "unit"), 3)
    total = m.add(inputs["candidate"], m.product("candidate", hidden), "candidate")
    added = m.multiply(accepts, m.tanh(total, "unit"), "addend")
    cell = m.add(m.multiply(keeps, cell, "addend"), added, "cell")
    return m.multiply(outputs, m.tanh(cell, "unit"), "hidden"), cell


def simple_step(m: Arithmetic, inputs: Mapping[str, Any], states: States, relu: bool) -> States:
    """Computes a step of a SimpleRNN: tanh or ReLU of (input product + state product)."""
    fed_back = m.product("sum", *states)
    if relu:
        return (m.add(inputs["sum"], fed_back, "hidden", maximum=np.inf),)
    return (m.tanh(m.add(inputs["sum"], fed_back, "sum"), "hidden"),)


def make_step(attributes: Attributes) -> Step:
    if "relu" in attributes:
        return partial(simple_step, relu=attributes["relu"])
    hard = attributes.get("hard", False)
    if "reset_after" in attributes:
        return partial(gru_step, reset_after=attributes["reset_after"], hard=hard)
    return partial(lstm_step, hard=hard)


def names_of_states(attributes: Attributes) -> tuple[str, ...]:
    return ("hidden", "cell") if has_cell(attributes) else ("hidden",)


def has_cell(attributes: Attributes) -> bool:
    return "relu" not in attributes and "reset_after" not in attributes


def convolves(attributes: Attributes) -> bool:
    """Returns True for ConvLSTM."""
    return "padding" in attributes


HARD_SIGMOID = keras.activations.hard_sigmoid
"""Keras 2's hard sigmoid: 0.2 * (x + 2.5), clipped to [0, 1]."""


class Part(NamedTuple):
    """A section of a layer's weights: blocks of columns with the same activation function.

    A hard sigmoid is slope * (x + offset), clipped to [0, 1]. The slope is multiplied into the
    weights' scales. The offset is added to the bias.
    """

    blocks: tuple[slice, ...]
    slope: float = 1.0
    offset: float = 0.0


def find_weight_parts(layer: Any) -> dict[str, Part]:
    """Returns the sections of a layer's weights by name: "sum", or "gates" and "candidate"."""
    units = layer.filters if isinstance(layer, CONV_LSTMS) else layer.units

    def block(first: int, count: int = 1) -> slice:
        return slice(first * units, (first + count) * units)

    if isinstance(layer, layers.SimpleRNN):
        return {"sum": Part((block(0),))}
    gates = (block(0, 2),) if isinstance(layer, layers.GRU) else (block(0), block(1), block(3))
    line = (0.2, 2.5) if layer.recurrent_activation is HARD_SIGMOID else (1.0, 0.0)
    return {"gates": Part(gates, *line), "candidate": Part((block(2),))}


def compute_offsets(layer: Any) -> np.ndarray:
    """Returns the `Part.offset` of each column of a layer's weights."""
    blocks = {
        block.start: (block, part.offset)
        for part in find_weight_parts(layer).values()
        for block in part.blocks
    }
    return np.concatenate(
        [np.full(block.stop - block.start, offset) for _, (block, offset) in sorted(blocks.items())]
    )


def select_columns(x: Any, part: Part) -> Any:
    blocks = [x[..., block] for block in part.blocks]
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate(blocks, -1) if isinstance(x, np.ndarray) else tf.concat(blocks, -1)


def inner_ranges(attributes: Attributes) -> dict[str, OwnRange]:
    """Maps the names of products and sums inside a step to their observed ranges.

    The products of an LSTM have zero point 0, because they are added in 16 bits.
    """
    if attributes.get("relu"):
        return {"input_sum": OWN, "state_sum": OWN, "hidden": OwnRange(non_negative=True)}
    names = ("sum",) if "relu" in attributes else ("gates", "candidate")
    if has_cell(attributes):
        symmetric = OwnRange(symmetric=True)
        return {f"{prefix}{name}": symmetric for name in names for prefix in ("input_", "state_")}
    ranges = {f"{prefix}{name}": OWN for name in names for prefix in ("input_", "state_", "")}
    if attributes.get("hard"):
        del ranges["gates"]
    return ranges


def count_steps(gates: int, call: Call) -> int | None:
    """Counts the multiply-accumulates of a recurrent layer. Each step multiplies all weights.

    A ConvLSTM multiplies all weights at each position of an image.
    """
    layer, (_, steps, *sizes) = call.layer, call.inputs[0].shape
    units: int = layer.units if hasattr(layer, "units") else layer.filters
    weights = None if sizes[-1] is None else gates * units * (sizes[-1] + units)
    if not hasattr(layer, "kernel_size"):
        return multiply_sizes((steps, weights))
    positions = call.output.shape[2 if layer.return_sequences else 1 : -1]
    return multiply_sizes((steps, weights, *positions, *layer.kernel_size))
