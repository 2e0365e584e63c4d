"""Computes steps of recurrent layers in integers, and writes them to files, by operators' rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.ops import elementwise
from keras_qat.ops.activations import ACTIVATIONS
from keras_qat.ops.composed import Computing, Emitting, Machine, Preparing, Quantized
from keras_qat.ops.conv import CONV
from keras_qat.ops.dense import DENSE
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Attributes, FixedRange, Op
from keras_qat.ops.recurrent.lstm import HIDDEN
from keras_qat.ops.recurrent.step_math import Part, convolves, find_weight_parts, select_columns
from keras_qat.ops.requantize import REQUANTIZE
from keras_qat.ops.weights import Weights

SIGMOID, TANH = (next(op for op in ACTIVATIONS if op.name == name) for name in ("sigmoid", "tanh"))
assert isinstance(SIGMOID.output, FixedRange)

UNIT, SUM, CELL = (QuantParams(np.float32(end / 2**15), 0, 16) for end in (1.0, 10.0, 20.0))
"""Parameters of 16 bits up to 1, 10 and 20. TFLite has other kernels for powers of two."""

FIXED: dict[str, FixedRange | QuantParams] = {
    "hidden": HIDDEN,
    "sigmoid": SIGMOID.output,
    "unit": UNIT,
    "cell": CELL,
    **dict.fromkeys(("gates", "candidate"), SUM),
}
"""Name of a tensor inside a step -> its range, unless an inner range has that name."""

ONE = QuantParams(np.float32(1 / 128), -128, 8)
"""Parameters of the constant 1, whose quantized value is 0."""


def get_fixed_params(name: str) -> QuantParams:
    """Returns the parameters of a tensor inside a step that has no inner range."""
    fixed = FIXED[name]
    return fixed.params(8) if isinstance(fixed, FixedRange) else fixed


def get_inner_params(weights: Weights, name: str) -> QuantParams:
    """Returns the parameters of a tensor inside a step."""
    return weights.inner[name] if name in weights.inner else get_fixed_params(name)


@dataclasses.dataclass(frozen=True)
class Steps:
    """A `step_math.Arithmetic` that uses an operator's row for everything that a step does.

    Args:
        machine: prepares, computes or writes the rows.
        parts: parts of the weights, by name.
        attributes: attributes of the layer's operator.
        weights: weights for the inputs, which include the recurrent weights.
    """

    machine: Machine
    parts: Mapping[str, Part]
    attributes: Attributes
    weights: Weights

    def named(self, name: str) -> QuantParams:
        return get_inner_params(self.weights, name)

    def input_product(self, part: str, x: Quantized) -> Quantized:
        """Returns the product of inputs with a part of their weights."""
        options = {name: self.attributes[name] for name in CONV.defaults if name in self.attributes}
        return self._product(x, self.weights, self.parts[part], f"input_{part}", options)

    def product(self, part: str, hidden: Quantized) -> Quantized:
        assert self.weights.recurrent is not None
        options = {**CONV.defaults, "padding": "same"}
        return self._product(
            hidden, self.weights.recurrent, self.parts[part], f"state_{part}", options
        )

    def _product(
        self, x: Quantized, weights: Weights, part: Part, name: str, convolved: Attributes
    ) -> Quantized:
        row, attributes = (
            (CONV, convolved) if convolves(self.attributes) else (DENSE, DENSE.defaults)
        )
        part_weights = _part_of(weights, part)
        return self.machine.run(
            row, [x], self.named(name), weights=part_weights, attributes=attributes
        )

    def add(
        self, first: Quantized, second: Quantized, name: str, maximum: float | None = None
    ) -> Quantized:
        return self._of_two(elementwise.ADD, [first, second], self.named(name), maximum)

    def multiply(self, first: Quantized, second: Quantized, name: str) -> Quantized:
        return self._of_two(elementwise.MULTIPLY, [first, second], self.named(name))

    def _of_two(
        self, op: Op, prepared: list[Quantized], params: QuantParams, maximum: float | None = None
    ) -> Quantized:
        """Runs a row in 8 bits, or in 16 bits if an input or the output has 16."""
        if all(item.bits == 8 for item in (params, *(own for _, own in prepared))):
            return self.machine.run(op, prepared, params, maximum=maximum)
        wide = params if params.bits == 16 else UNIT
        inputs = [x if x[1].bits == 16 else self.machine.widen(x) for x in prepared]
        result = self.machine.run(op, inputs, wide, maximum=maximum)
        return result if wide is params else self.requantized(result, params)

    def sigmoid(self, x: Quantized, name: str) -> Quantized:
        return self.machine.run(SIGMOID, [x], self.named(name))

    def tanh(self, x: Quantized, name: str) -> Quantized:
        return self.machine.run(TANH, [x], self.named(name))

    def from_one(self, x: Quantized) -> Quantized:
        return self.machine.run(elementwise.SUBTRACT, [self._zero(ONE), x], self.named("sigmoid"))

    def requantized(self, x: Quantized, params: QuantParams) -> Quantized:
        return self.machine.run(REQUANTIZE, [x], params)

    def split(self, x: Quantized, count: int) -> list[Quantized]:
        return self.machine.split(x, count)

    def _zero(self, params: QuantParams) -> Quantized:
        """Returns a constant with the quantized value 0."""
        return self.machine.constant("constant", np.zeros([]), params)

    def zeros(self, like: Quantized, name: str) -> Quantized:
        """Returns zeros for any number of examples: a number times zero."""
        zero = QuantParams(np.float32(1.0), 0, self.named(name).bits)
        return self.multiply(self._zero(zero), like, name)


def _part_of(weights: Weights, part: Part) -> Weights:
    """Returns some columns of weights, with their scales and biases."""
    if weights.q is None:  # They were prepared.
        return weights
    bias = None if weights.bias is None else select_columns(weights.bias, part)
    scale = select_columns(weights.scale, part) if weights.per_channel else weights.scale
    scale, q = scale * part.slope, select_columns(weights.q, part)
    is_array = isinstance(scale, np.ndarray)
    scale = np.float32(scale).astype(np.float64) if is_array else single(scale)
    return dataclasses.replace(weights, q=q, scale=scale, bias=bias, inner={}, recurrent=None)


def preparing(a: Arguments, prepared: list[Any]) -> Steps:
    """Returns steps that prepare rows, in order."""
    return Steps(Preparing(a, prepared), find_weight_parts(a.call.layer), a.attributes, a.weights)


def computing(a: Arguments, weights: Weights, prepared: Iterable[Any]) -> Steps:
    """Returns steps that compute, with weights of which only the inner ranges are left."""
    return Steps(Computing(a, prepared), find_weight_parts(a.call.layer), a.attributes, weights)


def writing(e: Emission) -> Steps:
    """Returns steps that write operators to a file."""
    image: tuple[int | None, ...] = ()
    if convolves(e.attributes):
        image = e.shape(e.outputs[0])[2 if e.attributes["sequences"] else 1 : -1]
        image = image if len(image) == 2 else (1, *image)
    return Steps(Emitting(e, image), find_weight_parts(e.node.call.layer), e.attributes, e.weights)
