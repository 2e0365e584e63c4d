"""Steps of recurrent layers as rows: what those compute in integers, and what they write."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
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
    *("computing", "fixed_params", "held_in", "params_named", "writing"),
]

SIGMOID, TANH = (next(op for op in ACTIVATIONS if op.name == name) for name in ("sigmoid", "tanh"))
assert isinstance(SIGMOID.output, FixedRange)

UNIT, SUM, CELL = (QuantParams(np.float32(end / 2**15), 0, 16) for end in (1.0, 10.0, 20.0))
"""16 bits up to 1, 10 and 20. For powers of two TFLite has other kernels of sigmoid and tanh."""

FIXED: dict[str, FixedRange | QuantParams] = {
    "hidden": HIDDEN,
    "sigmoid": SIGMOID.output,
    "unit": UNIT,
    "cell": CELL,
    **dict.fromkeys(("gates", "candidate"), SUM),
}
"""What numbers stand for, unless there is an inner range of that name."""

ONE = QuantParams(np.float32(1 / 128), -128, 8)
"""Of the constant 1: its quantized value is 0."""

Number = tuple[Any, QuantParams]
"""Quantized values less their zero point, or a tensor of a file; and what they stand for."""


def fixed_params(name: str) -> QuantParams:
    """What numbers of 8 bits stand for, or of 16, unless there is an inner range of that name."""
    found = FIXED[name]
    return found.params(8) if isinstance(found, FixedRange) else found


def params_named(weights: Weights, name: str) -> QuantParams:
    """Those of a tensor inside of a step."""
    return weights.inner[name] if name in weights.inner else fixed_params(name)


@dataclasses.dataclass(frozen=True)
class Steps:
    """A `recurrence.Machine`: a row for each thing that a step does.

    Args:
        parts: of the weights.
        attributes: of the layer's row.
        weights: of the inputs, with the recurrent ones in them.
        run: what is done with a row, numbers and the parameters of a result: it is computed, or
            written. Also takes `weights`, `attributes` other than the row's defaults, and
            `maximum`, where a ReLU behind it ends.
        split: a number in so many blocks of channels.
        constant: a number of one value, whose quantized value is 0.
        widened: a number of 8 bits with the zero point 0 in 16, in the same steps.
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
        """The product of inputs with a part of their weights."""
        own = {name: self.attributes[name] for name in CONV.defaults if name in self.attributes}
        return self._product(x, self.weights, self.parts[part], f"input_{part}", own)

    def product(self, part: str, hidden: Number) -> Number:
        assert self.weights.recurrent is not None
        own = {**CONV.defaults, "padding": "same"}
        return self._product(hidden, self.weights.recurrent, self.parts[part], f"state_{part}", own)

    def _product(
        self, x: Number, weights: Weights, part: Part, name: str, convolved: Attributes
    ) -> Number:
        row, how = (CONV, convolved) if convolves(self.attributes) else (DENSE, DENSE.defaults)
        held = _part_of(weights, part)
        return self.run(row, [x], self.named(name), weights=held, attributes=how)

    def add(self, first: Number, second: Number, name: str, maximum: float | None = None) -> Number:
        return self._of_two(elementwise.ADD, [first, second], self.named(name), maximum)

    def multiply(self, first: Number, second: Number, name: str) -> Number:
        return self._of_two(elementwise.MULTIPLY, [first, second], self.named(name))

    def _of_two(
        self, op: Op, given: list[Number], params: QuantParams, maximum: float | None = None
    ) -> Number:
        """A row on numbers of 8 bits, or on numbers of 16 if one or the result has so many."""
        if all(each.bits == 8 for each in (params, *(own for _, own in given))):
            return self.run(op, given, params, maximum=maximum)
        wide = params if params.bits == 16 else UNIT
        inputs = [each if each[1].bits == 16 else self.widened(each) for each in given]
        found = self.run(op, inputs, wide, maximum=maximum)
        return found if wide is params else self.run(REQUANTIZE, [found], params)

    def sigmoid(self, x: Number, name: str) -> Number:
        return self.run(SIGMOID, [x], self.named(name))

    def tanh(self, x: Number, name: str) -> Number:
        return self.run(TANH, [x], self.named(name))

    def from_one(self, x: Number) -> Number:
        return self.run(elementwise.SUBTRACT, [self.constant(ONE), x], self.named("sigmoid"))

    def zeros(self, like: Number, name: str) -> Number:
        """As many zeros: a number times zero, as there may be any number of examples."""
        zero = QuantParams(np.float32(1.0), 0, self.named(name).bits)
        return self.multiply(self.constant(zero), like, name)


def _part_of(weights: Weights, part: Part) -> Weights:
    """Some columns of weights, with their scales and biases."""
    bias = None if weights.bias is None else columns(weights.bias, part)
    scale = columns(weights.scale, part) if weights.per_channel else weights.scale
    scale, q = scale * part.slope, columns(weights.q, part)
    is_array = isinstance(scale, np.ndarray)
    scale = np.float32(scale).astype(np.float64) if is_array else single(scale)
    return dataclasses.replace(weights, q=q, scale=scale, bias=bias, inner={}, recurrent=None)


def held_in(params: QuantParams) -> tf.DType:
    """The type of quantized values less their zero point."""
    return tf.float64 if params.bits == 16 else tf.float32


def computing(a: Arguments) -> Steps:
    """Steps in the rounding of a family."""

    def run(
        op: Op,
        given: list[Number],
        params: QuantParams,
        weights: Any = None,
        attributes: Attributes | None = None,
        maximum: float | None = None,
    ) -> Number:
        params = params.as_tensors()
        own = dataclasses.replace(
            a,
            attributes=op.defaults if attributes is None else attributes,
            q=[q for q, _ in given],
            params=[each.as_tensors() for _, each in given],
            output=params,
            weights=weights,
            merges_relu=maximum is not None,
        )
        q = tf.cast(op.compute(own), held_in(params))
        low, high = (
            tf.cast(end - params.zero_point, q.dtype) for end in (params.lowest, params.highest)
        )
        low = low if maximum is None else tf.maximum(low, 0.0)
        return tf.minimum(tf.maximum(q, low), high), params

    def split(x: Number, count: int) -> list[Number]:
        return [(q, x[1]) for q in tf.split(x[0], count, -1)]

    def constant(params: QuantParams) -> Number:
        return tf.constant(float(-params.zero_point), held_in(params)), params

    def widened(x: Number) -> Number:
        params = dataclasses.replace(x[1], bits=16)
        return tf.cast(x[0], held_in(params)), params

    return Steps(parts(a.call.layer), a.attributes, a.weights, run, split, constant, widened)


def _sizes(e: Emission) -> tuple[int | None, ...]:
    """Height and width of states that are images; none of others."""
    if not convolves(e.attributes):
        return ()
    sizes = e.shape(e.outputs[0])[2 if e.attributes["sequences"] else 1 : -1]
    return sizes if len(sizes) == 2 else (1, *sizes)


def writing(e: Emission) -> Steps:
    """Steps as operators of a file."""
    from keras_qat.ops.node import Node, Tensor

    counter, sizes = itertools.count(1), _sizes(e)

    def run(
        op: Op,
        given: list[Number],
        params: QuantParams,
        weights: Any = None,
        attributes: Attributes | None = None,
        maximum: float | None = None,
    ) -> Number:
        count = next(counter)
        name, shape = f"{e.node.name}/{count}", e.shape(given[-1][0])
        if weights is not None:
            shape = shape[0], *(sizes or shape[1:-1]), weights.q.shape[-1]
        target = e.temporary(str(count), shape, params)

        def tensor(label: str, index: int, params: QuantParams) -> Tensor:
            return Tensor(f"{name}/{label}", e.shape(index), "float32", params)

        read = tuple(tensor(str(at), *each) for at, each in enumerate(given))
        made, how = (tensor("output", target, params),), attributes or op.defaults
        node = Node(name, op, how, e.node.call, read, made, weights, maximum)
        op.emit(Emission(e.builder, node, [index for index, _ in given], [target]))
        return target, params

    def split(x: Number, count: int) -> list[Number]:
        index, params = x
        *sizes, channels = e.shape(index)
        assert channels is not None
        at, shape = next(counter), (*sizes, channels // count)
        found = [e.temporary(f"{at}/{place}", shape, index) for place in range(count)]
        axis = e.constant("axis", len(sizes))
        e.add("SPLIT", [axis, index], found, numSplits=count)
        return [(each, params) for each in found]

    def constant(params: QuantParams) -> Number:
        return e.constant("constant", np.array(0, params.dtype), params), params

    def widened(x: Number) -> Number:
        index, params = x[0], dataclasses.replace(x[1], bits=16)
        found = e.temporary(f"{next(counter)}/wide", e.shape(index), params)
        kinds = {"inDataType": TYPES["int8"], "outDataType": TYPES["int16"]}
        e.add("CAST", [index], [found], **kinds)
        return found, params

    of = parts(e.node.call.layer)
    return Steps(of, e.attributes, e.weights, run, split, constant, widened)
