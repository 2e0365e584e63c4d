"""Computes steps of recurrent layers in integers, and writes them to files, by operators' rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.ops import elementwise
from keras_qat.ops.activations import ACTIVATIONS
from keras_qat.ops.conv import CONV
from keras_qat.ops.dense import DENSE
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Attributes, FixedRange, Op
from keras_qat.ops.recurrent.lstm import HIDDEN
from keras_qat.ops.recurrent.step_math import Part, columns, convolves, parts
from keras_qat.ops.requantize import REQUANTIZE
from keras_qat.tflite.schema import TYPES

if TYPE_CHECKING:
    from keras_qat.ops.weights import Weights

__all__ = [
    *("FIXED", "SIGMOID", "Number", "Steps"),
    *("computing", "fixed_params", "held_in", "params_named", "preparing", "writing"),
]

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

Number = tuple[Any, QuantParams]
"""Quantized values less their zero point, or a tensor of a file, with quantization parameters."""


def fixed_params(name: str) -> QuantParams:
    """Returns the parameters of a tensor inside a step that has no inner range."""
    fixed = FIXED[name]
    return fixed.params(8) if isinstance(fixed, FixedRange) else fixed


def params_named(weights: Weights, name: str) -> QuantParams:
    """Returns the parameters of a tensor inside a step."""
    return weights.inner[name] if name in weights.inner else fixed_params(name)


@dataclasses.dataclass(frozen=True)
class Steps:
    """A `step_math.Machine` that uses an operator's row for everything that a step does.

    Args:
        parts: parts of the weights, by name.
        attributes: attributes of the layer's operator.
        weights: weights for the inputs, which include the recurrent weights.
        run: computes or writes an operator, given its row, inputs and the output's parameters.
            Also takes `weights`, `attributes` other than the row's defaults, and the `maximum` of
            a fused ReLU.
        split: splits a number into blocks of channels.
        constant: makes a number with the quantized value 0.
        widened: turns a number of 8 bits with zero point 0 into 16 bits with the same scale.
    """

    parts: Mapping[str, Part]
    attributes: Attributes
    weights: Weights
    run: Callable[..., Number]
    split: Callable[[Number, int], list[Number]]
    constant: Callable[[QuantParams], Number]
    widened: Callable[[Number], Number]

    def named(self, name: str) -> QuantParams:
        return params_named(self.weights, name)

    def given(self, part: str, x: Number) -> Number:
        """Returns the product of inputs with a part of their weights."""
        options = {name: self.attributes[name] for name in CONV.defaults if name in self.attributes}
        return self._product(x, self.weights, self.parts[part], f"input_{part}", options)

    def product(self, part: str, hidden: Number) -> Number:
        assert self.weights.recurrent is not None
        options = {**CONV.defaults, "padding": "same"}
        return self._product(
            hidden, self.weights.recurrent, self.parts[part], f"state_{part}", options
        )

    def _product(
        self, x: Number, weights: Weights, part: Part, name: str, convolved: Attributes
    ) -> Number:
        row, attributes = (
            (CONV, convolved) if convolves(self.attributes) else (DENSE, DENSE.defaults)
        )
        part_weights = _part_of(weights, part)
        return self.run(row, [x], self.named(name), weights=part_weights, attributes=attributes)

    def add(self, first: Number, second: Number, name: str, maximum: float | None = None) -> Number:
        return self._of_two(elementwise.ADD, [first, second], self.named(name), maximum)

    def multiply(self, first: Number, second: Number, name: str) -> Number:
        return self._of_two(elementwise.MULTIPLY, [first, second], self.named(name))

    def _of_two(
        self, op: Op, numbers: list[Number], params: QuantParams, maximum: float | None = None
    ) -> Number:
        """Runs a row in 8 bits, or in 16 bits if an input or the output has 16."""
        if all(item.bits == 8 for item in (params, *(own for _, own in numbers))):
            return self.run(op, numbers, params, maximum=maximum)
        wide = params if params.bits == 16 else UNIT
        inputs = [x if x[1].bits == 16 else self.widened(x) for x in numbers]
        result = self.run(op, inputs, wide, maximum=maximum)
        return result if wide is params else self.run(REQUANTIZE, [result], params)

    def sigmoid(self, x: Number, name: str) -> Number:
        return self.run(SIGMOID, [x], self.named(name))

    def tanh(self, x: Number, name: str) -> Number:
        return self.run(TANH, [x], self.named(name))

    def from_one(self, x: Number) -> Number:
        return self.run(elementwise.SUBTRACT, [self.constant(ONE), x], self.named("sigmoid"))

    def zeros(self, like: Number, name: str) -> Number:
        """Returns zeros for any number of examples: a number times zero."""
        zero = QuantParams(np.float32(1.0), 0, self.named(name).bits)
        return self.multiply(self.constant(zero), like, name)


def _part_of(weights: Weights, part: Part) -> Weights:
    """Returns some columns of weights, with their scales and biases."""
    if weights.q is None:  # They were prepared.
        return weights
    bias = None if weights.bias is None else columns(weights.bias, part)
    scale = columns(weights.scale, part) if weights.per_channel else weights.scale
    scale, q = scale * part.slope, columns(weights.q, part)
    is_array = isinstance(scale, np.ndarray)
    scale = np.float32(scale).astype(np.float64) if is_array else single(scale)
    return dataclasses.replace(weights, q=q, scale=scale, bias=bias, inner={}, recurrent=None)


def held_in(params: QuantParams) -> tf.DType:
    """Returns the type in which quantized values less their zero point are computed."""
    return tf.float64 if params.bits == 16 else tf.float32


def preparing(a: Arguments, numbers: list[Any]) -> Steps:
    """Returns steps that prepare rows, in order, and compute nothing: tensors are `TensorSpec`s.

    Args:
        a: the arguments of the layer's row.
        numbers: takes what `computing` needs.
    """

    def run(
        op: Op,
        inputs: list[Number],
        params: QuantParams,
        weights: Any = None,
        attributes: Attributes | None = None,
        maximum: float | None = None,
    ) -> Number:
        own = dataclasses.replace(
            _given_to(a, op, [q for q, _ in inputs], attributes, maximum),
            params=[each.as_tensors() for _, each in inputs],
            output=params.as_tensors(),
            weights=weights,
        )
        dtype, output = held_in(params), own.output
        low, high = (end - output.zero_point for end in (params.lowest, params.highest))
        low = low if maximum is None else tf.maximum(low, 0.0)
        numbers.append((op.prepared(own).numbers, tf.cast(low, dtype), tf.cast(high, dtype)))
        shape = inputs[-1][0].shape
        if weights is not None:
            shape = [*shape[:-1], weights.q.shape[-1]]
        return tf.TensorSpec(shape, dtype), params

    def split(x: Number, count: int) -> list[Number]:
        spec, params = x
        shape = [*spec.shape[:-1], spec.shape[-1] // count]
        return [(tf.TensorSpec(shape, spec.dtype), params)] * count

    def constant(params: QuantParams) -> Number:
        return tf.TensorSpec([], held_in(params)), params

    def widened(x: Number) -> Number:
        params = dataclasses.replace(x[1], bits=16)
        return tf.TensorSpec(x[0].shape, held_in(params)), params

    return Steps(parts(a.call.layer), a.attributes, a.weights, run, split, constant, widened)


def _given_to(
    a: Arguments, op: Op, q: list[Any], attributes: Attributes | None, maximum: float | None
) -> Arguments:
    own = op.defaults if attributes is None else attributes
    return dataclasses.replace(a, q=q, attributes=own, merges_relu=maximum is not None)


def computing(a: Arguments, weights: Weights, numbers: Iterable[Any]) -> Steps:
    """Returns steps that compute with the rounding of a kernel family.

    Args:
        a: the arguments of the layer's row.
        weights: its weights, of which only the inner ranges are left.
        numbers: what `preparing` has found for the same steps.
    """
    prepared = iter(numbers)

    def run(
        op: Op,
        inputs: list[Number],
        params: QuantParams,
        weights: Any = None,
        attributes: Attributes | None = None,
        maximum: float | None = None,
    ) -> Number:
        of_row, low, high = next(prepared)
        own = dataclasses.replace(
            _given_to(a, op, [q for q, _ in inputs], attributes, maximum),
            params=[each for _, each in inputs],
            output=params,
            numbers=of_row,
        )
        q = tf.cast(op.compute(own), held_in(params))
        return tf.minimum(tf.maximum(q, low), high), params

    def split(x: Number, count: int) -> list[Number]:
        return [(q, x[1]) for q in tf.split(x[0], count, -1)]

    def constant(params: QuantParams) -> Number:
        return tf.constant(float(-params.zero_point), held_in(params)), params

    def widened(x: Number) -> Number:
        params = dataclasses.replace(x[1], bits=16)
        return tf.cast(x[0], held_in(params)), params

    return Steps(parts(a.call.layer), a.attributes, weights, run, split, constant, widened)


def _sizes(e: Emission) -> tuple[int | None, ...]:
    """Returns height and width of states that are images; nothing for others."""
    if not convolves(e.attributes):
        return ()
    sizes = e.shape(e.outputs[0])[2 if e.attributes["sequences"] else 1 : -1]
    return sizes if len(sizes) == 2 else (1, *sizes)


def writing(e: Emission) -> Steps:
    """Returns steps that write operators to a file."""
    from keras_qat.ops.node import Node, Tensor

    counter, sizes = itertools.count(1), _sizes(e)

    def run(
        op: Op,
        inputs: list[Number],
        params: QuantParams,
        weights: Any = None,
        attributes: Attributes | None = None,
        maximum: float | None = None,
    ) -> Number:
        count = next(counter)
        name, shape = f"{e.node.name}/{count}", e.shape(inputs[-1][0])
        if weights is not None:
            shape = shape[0], *(sizes or shape[1:-1]), weights.q.shape[-1]
        target = e.temporary(str(count), shape, params)

        def tensor(label: str, index: int, params: QuantParams) -> Tensor:
            return Tensor(f"{name}/{label}", e.shape(index), "float32", params)

        sources = tuple(tensor(str(index), *x) for index, x in enumerate(inputs))
        outputs, chosen = (tensor("output", target, params),), attributes or op.defaults
        node = Node(name, op, chosen, e.node.call, sources, outputs, weights, maximum)
        op.emit(Emission(e.builder, node, [index for index, _ in inputs], [target]))
        return target, params

    def split(x: Number, count: int) -> list[Number]:
        index, params = x
        *sizes, channels = e.shape(index)
        assert channels is not None
        number, shape = next(counter), (*sizes, channels // count)
        targets = [
            e.temporary(f"{number}/{index_of_block}", shape, index)
            for index_of_block in range(count)
        ]
        axis = e.constant("axis", len(sizes))
        e.add("SPLIT", [axis, index], targets, numSplits=count)
        return [(target, params) for target in targets]

    def constant(params: QuantParams) -> Number:
        return e.constant("constant", np.array(0, params.dtype), params), params

    def widened(x: Number) -> Number:
        index, params = x[0], dataclasses.replace(x[1], bits=16)
        target = e.temporary(f"{next(counter)}/wide", e.shape(index), params)
        kinds = {"inDataType": TYPES["int8"], "outDataType": TYPES["int16"]}
        e.add("CAST", [index], [target], **kinds)
        return target, params

    of = parts(e.node.call.layer)
    return Steps(of, e.attributes, e.weights, run, split, constant, widened)
