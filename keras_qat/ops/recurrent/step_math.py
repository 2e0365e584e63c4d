"""The steps of recurrent layers. Training and integer inference share this code."""

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
    """The operations of a step, in float or in integers. `name` is the name of a result's range."""

    def product(self, part: str, hidden: Any) -> Any:
        """Multiplies a hidden state by a section of the recurrent weights, and adds the bias."""

    def add(self, first: Any, second: Any, name: str, maximum: float | None = None) -> Any:
        """Adds two values. If `maximum` is not None, a ReLU with this maximum follows."""

    def multiply(self, first: Any, second: Any, name: str) -> Any: ...
    def sigmoid(self, x: Any, name: str) -> Any: ...
    def tanh(self, x: Any, name: str) -> Any: ...
    def subtract_from_one(self, x: Any) -> Any:
        """Computes 1 - x."""

    def split(self, x: Any, count: int) -> list[Any]:
        """Splits `x` into `count` blocks of channels."""


States = tuple[Any, ...]
"""The states after a step. The first is the layer's output."""

Step = Callable[[Arithmetic, Mapping[str, Any], States], States]
"""A function of an `Arithmetic`, the products of the step's inputs by section, and the states.
It returns the next states."""


def _gates(m: Arithmetic, inputs: Mapping[str, Any], hidden: Any, hard: bool, name: str) -> Any:
    """Compute the gates: a sigmoid of the sum of input and state products.

    A hard sigmoid only clips the sum. The weights include the slope and the offset.
    """
    fed_back = m.product("gates", hidden)
    if hard:
        return m.add(inputs["gates"], fed_back, name, maximum=1.0)
    return m.sigmoid(m.add(inputs["gates"], fed_back, "gates"), name)


def gru_step(
    m: Arithmetic, inputs: Mapping[str, Any], states: States, reset_after: bool, hard: bool
) -> States:
    """Computes gates z and r and the candidate. Returns z * hidden + (1 - z) * candidate."""
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
    """Computes gates i, f and o and the candidate. Returns o * tanh(c) and c.

    The new cell state is c = f * c + i * candidate. As in TFLite's LSTM, values between the
    products and the hidden state have 16 bits.
    """
    hidden, cell = states
    accepts, keeps, outputs = m.split(_gates(m, inputs, hidden, hard, "unit"), 3)
    total = m.add(inputs["candidate"], m.product("candidate", hidden), "candidate")
    added = m.multiply(accepts, m.tanh(total, "unit"), "addend")
    cell = m.add(m.multiply(keeps, cell, "addend"), added, "cell")
    return m.multiply(outputs, m.tanh(cell, "unit"), "hidden"), cell


def simple_step(m: Arithmetic, inputs: Mapping[str, Any], states: States, relu: bool) -> States:
    """Computes the tanh or ReLU of the sum of input and state products."""
    fed_back = m.product("sum", *states)
    if relu:
        return (m.add(inputs["sum"], fed_back, "hidden", maximum=np.inf),)
    return (m.tanh(m.add(inputs["sum"], fed_back, "sum"), "hidden"),)


def make_step(attributes: Attributes) -> Step:
    """Returns the step function of a layer with these attributes."""
    if "relu" in attributes:
        return partial(simple_step, relu=attributes["relu"])
    hard = attributes.get("hard", False)
    if "reset_after" in attributes:
        return partial(gru_step, reset_after=attributes["reset_after"], hard=hard)
    return partial(lstm_step, hard=hard)


def names_of_states(attributes: Attributes) -> tuple[str, ...]:
    """Returns the names of the states' ranges."""
    return ("hidden", "cell") if has_cell(attributes) else ("hidden",)


def has_cell(attributes: Attributes) -> bool:
    """Returns True if a layer with these attributes has a cell state, like an LSTM."""
    return "relu" not in attributes and "reset_after" not in attributes


def convolves(attributes: Attributes) -> bool:
    """Returns True if a layer with these attributes convolves images, like a ConvLSTM."""
    return "padding" in attributes


HARD_SIGMOID = keras.activations.hard_sigmoid
"""Keras 2's hard sigmoid: 0.2 * (x + 2.5), clipped to [0, 1]."""


class Part(NamedTuple):
    """Columns of a layer's weights with the same activation function.

    A hard sigmoid clips slope * (product + offset). The weights' scales include the slope. The bias
    of the inputs includes the offset.
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
    """Returns the offset of each column of a layer's weights."""
    blocks = {
        block.start: (block, part.offset)
        for part in find_weight_parts(layer).values()
        for block in part.blocks
    }
    return np.concatenate(
        [np.full(block.stop - block.start, offset) for _, (block, offset) in sorted(blocks.items())]
    )


def select_columns(x: Any, part: Part) -> Any:
    """Returns the columns of `x` that belong to a part. `x` is an array or a tensor."""
    blocks = [x[..., block] for block in part.blocks]
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate(blocks, -1) if isinstance(x, np.ndarray) else tf.concat(blocks, -1)


def inner_ranges(attributes: Attributes) -> dict[str, OwnRange]:
    """Returns the ranges of products and sums that are observed inside a step, by name.

    16-bit sums have fixed ranges. Products that become 16-bit have the zero point 0.
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
    """Counts the multiply-accumulates of a recurrent layer: steps times weights.

    A ConvLSTM multiplies all weights at each position of an image.
    """
    layer, (_, steps, *sizes) = call.layer, call.inputs[0].shape
    units: int = layer.units if hasattr(layer, "units") else layer.filters
    weights = None if sizes[-1] is None else gates * units * (sizes[-1] + units)
    if not hasattr(layer, "kernel_size"):
        return multiply_sizes((steps, weights))
    positions = call.output.shape[2 if layer.return_sequences else 1 : -1]
    return multiply_sizes((steps, weights, *positions, *layer.kernel_size))
