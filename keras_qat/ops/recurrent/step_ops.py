"""Computes the steps of recurrent layers in integers, with operators such as ADD, MUL and TANH."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.ops import elementwise
from keras_qat.ops.activations import ACTIVATIONS
from keras_qat.ops.composed import Emitting, Machine, Quantized
from keras_qat.ops.conv import CONV
from keras_qat.ops.dense import DENSE
from keras_qat.ops.emission import Emission, Shape
from keras_qat.ops.op import Arguments, Attributes, FixedRange, Op
from keras_qat.ops.recurrent.lstm import HIDDEN
from keras_qat.ops.recurrent.step_math import Part, convolves, find_weight_parts, select_columns
from keras_qat.ops.requantize import REQUANTIZE
from keras_qat.ops.weights import Weights

SIGMOID, TANH = (next(op for op in ACTIVATIONS if op.name == name) for name in ("sigmoid", "tanh"))
assert isinstance(SIGMOID.output, FixedRange)

UNIT, SUM, CELL = (QuantParams(np.float32(end / 2**15), 0, 16) for end in (1.0, 10.0, 20.0))
"""16-bit parameters for values up to 1, 10 and 20. With 10 and 20, scales are not powers of two.
For powers of two, some kernels compute sigmoid and tanh differently."""

NEVER_CLIPPED = (UNIT, SUM)
"""Parameters of tensors that never exceed the range, so clipping is not necessary."""

FIXED: dict[str, FixedRange | QuantParams] = {
    "hidden": HIDDEN,
    "sigmoid": SIGMOID.output,
    "unit": UNIT,
    **dict.fromkeys(("addend", "cell"), CELL),
    **dict.fromkeys(("gates", "candidate"), SUM),
}
"""Maps the name of a tensor inside a step to its range, if the range is not observed."""

ONE = QuantParams(np.float32(1 / 128), -128, 8)
"""Quantization parameters of a constant 1. It is stored as 0, because (0 + 128) / 128 = 1."""


def get_fixed_params(name: str) -> QuantParams:
    fixed = FIXED[name]
    return fixed.params(8) if isinstance(fixed, FixedRange) else fixed


def get_inner_params(weights: Weights, name: str) -> QuantParams:
    return weights.inner[name] if name in weights.inner else get_fixed_params(name)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Implements `step_math.Arithmetic` in integers, with TFLite's operators.

    Args:
        machine: runs each operator. It may be a `Preparing`, a `Computing` or an `Emitting`.
        parts: sections of the weights, by name.
        attributes: options of the recurrent layer.
        weights: the weights for inputs. `weights.recurrent` has the weights for hidden states.
            If they are already prepared, only their ranges (`inner`) are left.
    """

    machine: Machine
    parts: Mapping[str, Part]
    attributes: Attributes
    weights: Weights

    def get_params(self, name: str) -> QuantParams:
        return get_inner_params(self.weights, name)

    def multiply_input(self, part: str, x: Quantized) -> Quantized:
        options = {name: self.attributes[name] for name in CONV.defaults if name in self.attributes}
        return self._multiply_weights(x, self.weights, part, f"input_{part}", options)

    def product(self, part: str, hidden: Quantized) -> Quantized:
        assert self.weights.recurrent is not None
        options = {**CONV.defaults, "padding": "same"}
        return self._multiply_weights(
            hidden, self.weights.recurrent, part, f"state_{part}", options
        )

    def _multiply_weights(
        self, x: Quantized, weights: Weights, part: str, name: str, options: Attributes
    ) -> Quantized:
        row, attributes = (CONV, options) if convolves(self.attributes) else (DENSE, DENSE.defaults)
        some = _select_part(weights, self.parts[part])
        return self.machine.run(
            row, [x], self.get_params(name), weights=some, attributes=attributes
        )

    def add(
        self, first: Quantized, second: Quantized, name: str, maximum: float | None = None
    ) -> Quantized:
        return self._run_on_two(elementwise.ADD, [first, second], name, maximum)

    def multiply(self, first: Quantized, second: Quantized, name: str) -> Quantized:
        return self._run_on_two(elementwise.MULTIPLY, [first, second], name)

    def _run_on_two(
        self, op: Op, inputs: list[Quantized], name: str, maximum: float | None = None
    ) -> Quantized:
        """Run an operator in 16 bits if an input or the output has 16 bits, otherwise in 8 bits."""
        params = self.get_params(name)
        if all(item.bits == 8 for item in (params, *(own for _, own in inputs))):
            return self.machine.run(op, inputs, params, maximum=maximum)
        wide = params if params.bits == 16 else UNIT
        inputs = [x if x[1].bits == 16 else self.machine.widen(x) for x in inputs]
        result = self.machine.run(op, inputs, wide, maximum=maximum)
        return result if wide is params else self.requantize(result, params)

    def sigmoid(self, x: Quantized, name: str) -> Quantized:
        return self.machine.run(SIGMOID, [x], self.get_params(name))

    def tanh(self, x: Quantized, name: str) -> Quantized:
        return self.machine.run(TANH, [x], self.get_params(name))

    def subtract_from_one(self, x: Quantized) -> Quantized:
        params = self.get_params("sigmoid")
        return self.machine.run(elementwise.SUBTRACT, [self._add_zero(ONE), x], params)

    def requantize(self, x: Quantized, params: QuantParams) -> Quantized:
        return self.machine.run(REQUANTIZE, [x], params)

    def split(self, x: Quantized, count: int) -> list[Quantized]:
        return self.machine.split(x, count)

    def _add_zero(self, params: QuantParams) -> Quantized:
        """Add a constant with the integer 0. Its value is 1 if `params` is `ONE`."""
        return self.machine.constant("constant", np.zeros([]), params)

    def zeros(self, like: Quantized, name: str) -> Quantized:
        """Returns zeros with the shape of `like`, even if sizes are known only at run time."""
        zero = QuantParams(np.float32(1.0), 0, self.get_params(name).bits)
        return self.multiply(self._add_zero(zero), like, name)


def _select_part(weights: Weights, part: Part) -> Weights:
    """Return the columns of a section. Their scales include the slope of a hard sigmoid."""
    if weights.q is None:  # After preparation.
        return weights
    bias = None if weights.bias is None else select_columns(weights.bias, part)
    scale = select_columns(weights.scale, part) if weights.per_channel else weights.scale
    scale, q = scale * part.slope, select_columns(weights.q, part)
    is_array = isinstance(scale, np.ndarray)
    scale = np.float32(scale).astype(np.float64) if is_array else single(scale)
    return dataclasses.replace(weights, q=q, scale=scale, bias=bias, inner={}, recurrent=None)


def make_steps(a: Arguments, machine: Machine, weights: Weights) -> Steps:
    return Steps(machine, find_weight_parts(a.call.layer), a.attributes, weights)


def make_emitting_steps(e: Emission) -> Steps:
    image: Shape = ()
    if convolves(e.attributes):
        image = e.shape(e.outputs[0])[2 if e.attributes["sequences"] else 1 : -1]
        image = image if len(image) == 2 else (1, *image)
    parts = find_weight_parts(e.node.call.layer)
    return Steps(Emitting(e, image), parts, e.attributes, e.weights)
