"""Steps of recurrent layers as rows: what those compute in integers, and what they write."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.qparams import QuantParams
from keras_qat.ops import elementwise
from keras_qat.ops.activations import ACTIVATIONS
from keras_qat.ops.dense import DENSE
from keras_qat.ops.lstm import HIDDEN
from keras_qat.ops.op import Arguments, FixedRange, Op
from keras_qat.ops.recurrence import Part, columns, parts
from keras_qat.tflite.emission import Emission

if TYPE_CHECKING:
    from keras_qat.resolved.weights import Weights

__all__ = ["FIXED", "SIGMOID", "Number", "Steps", "computing", "params_named", "writing"]

SIGMOID, TANH = (next(op for op in ACTIVATIONS if op.name == name) for name in ("sigmoid", "tanh"))
GATE = SIGMOID.output
assert isinstance(GATE, FixedRange)

FIXED: dict[str, FixedRange] = {"hidden": HIDDEN, "sigmoid": GATE}
"""Ranges that kernels fix, unless there is an inner one of that name."""

ONE = QuantParams(np.float32(1 / 128), -128, 8)
"""Of the constant 1: its quantized value is 0."""

ZERO = QuantParams(np.float32(1.0), 0, 8)
"""Of the constant 0, likewise."""

Number = tuple[Any, QuantParams]
"""Quantized values less their zero point, or a tensor of a file; and what they stand for."""


def params_named(weights: Weights, name: str) -> QuantParams:
    """Those of a tensor inside of a step."""
    return weights.inner[name] if name in weights.inner else FIXED[name].params(8)


@dataclasses.dataclass(frozen=True)
class Steps:
    """A `recurrence.Machine`: a row for each thing that a step does.

    Args:
        parts: of the weights.
        weights: of the inputs, with the recurrent ones in them.
        run: what is done with a row, numbers and the parameters of a result: it is computed, or
            written. Also takes `weights`, and `relu`, whether results below zero count as zero.
        split: a number in so many blocks of channels.
        constant: a number of one value, whose quantized value is 0.
    """

    parts: Mapping[str, Part]
    weights: Weights
    run: Callable[..., Number]
    split: Callable[[Number, int], list[Number]]
    constant: Callable[[QuantParams], Number]

    def named(self, name: str) -> QuantParams:
        return params_named(self.weights, name)

    def given(self, part: str, x: Number) -> Number:
        """The product of inputs with a part of their weights."""
        held = _part_of(self.weights, self.parts[part])
        return self.run(DENSE, [x], self.named(f"input_{part}"), weights=held)

    def product(self, part: str, hidden: Number) -> Number:
        assert self.weights.recurrent is not None
        held = _part_of(self.weights.recurrent, self.parts[part])
        return self.run(DENSE, [hidden], self.named(f"state_{part}"), weights=held)

    def add(self, first: Number, second: Number, name: str, relu: bool = False) -> Number:
        return self.run(elementwise.ADD, [first, second], self.named(name), relu=relu)

    def multiply(self, first: Number, second: Number, name: str) -> Number:
        return self.run(elementwise.MULTIPLY, [first, second], self.named(name))

    def sigmoid(self, x: Number) -> Number:
        return self.run(SIGMOID, [x], self.named("sigmoid"))

    def tanh(self, x: Number) -> Number:
        return self.run(TANH, [x], HIDDEN.params(8))

    def from_one(self, x: Number) -> Number:
        return self.run(elementwise.SUBTRACT, [self.constant(ONE), x], self.named("sigmoid"))

    def zeros(self, like: Number, name: str) -> Number:
        """As many zeros: a number times zero, as there may be any number of examples."""
        return self.multiply(self.constant(ZERO), like, name)


def _part_of(weights: Weights, part: Part) -> Weights:
    """Some columns of weights, with their scales and biases."""
    bias = None if weights.bias is None else columns(weights.bias, part)
    scale = columns(weights.scale, part) if weights.per_channel else weights.scale
    q = columns(weights.q, part)
    return dataclasses.replace(weights, q=q, scale=scale, bias=bias, inner={}, recurrent=None)


def computing(a: Arguments) -> Steps:
    """Steps in the rounding of a family."""

    def run(
        op: Op, given: list[Number], params: QuantParams, weights: Any = None, relu: bool = False
    ) -> Number:
        params = params.as_tensors()
        own = dataclasses.replace(
            a,
            attributes=op.defaults,
            q=[q for q, _ in given],
            params=[each.as_tensors() for _, each in given],
            output=params,
            weights=weights,
            merges_relu=relu,
        )
        q = op.compute(own)
        low, high = (
            tf.cast(end - params.zero_point, q.dtype) for end in (params.lowest, params.highest)
        )
        return tf.minimum(tf.maximum(q, low), high), params

    def split(x: Number, count: int) -> list[Number]:
        return [(q, x[1]) for q in tf.split(x[0], count, -1)]

    def constant(params: QuantParams) -> Number:
        return tf.constant(float(-params.zero_point)), params

    return Steps(parts(a.call.layer), a.weights, run, split, constant)


def writing(e: Emission) -> Steps:
    """Steps as operators of a file."""
    from keras_qat.resolved.graph import Node, Tensor

    counter = itertools.count(1)

    def run(
        op: Op, given: list[Number], params: QuantParams, weights: Any = None, relu: bool = False
    ) -> Number:
        count = next(counter)
        name, shape = f"{e.node.name}/{count}", e.shape(given[-1][0])
        if weights is not None:
            shape = *shape[:-1], weights.q.shape[-1]
        target = e.temporary(str(count), shape, params)

        def tensor(label: str, index: int, params: QuantParams) -> Tensor:
            return Tensor(f"{name}/{label}", e.shape(index), "float32", params)

        read = tuple(tensor(str(at), *each) for at, each in enumerate(given))
        made, maximum = (tensor("output", target, params),), np.inf if relu else None
        node = Node(name, op, op.defaults, e.node.call, read, made, weights, maximum)
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
        return e.constant("constant", np.array(0, np.int8), params), params

    return Steps(parts(e.node.call.layer), e.weights, run, split, constant)
