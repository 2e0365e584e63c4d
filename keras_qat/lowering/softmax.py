"""Lowers softmax, and recognizes a softmax that a model computes with several operations."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import operation_class, read_scalar
from keras_qat.helper_layers.finite_functions import SoftmaxOfMany
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, replace_by
from keras_qat.lowering.patterns import (
    Match,
    Matcher,
    Pattern,
    Rule,
    any_of,
    argument,
    between,
    operation,
    repeated,
    tensor,
)
from keras_qat.ops.composed import NO_WIDE
from keras_qat.ops.registry import match as match_row
from keras_qat.ops.softmax import SOFTMAX
from keras_qat.ops.softmax_of_many import FEW_IN_ALL, MANY, SOME

_LEAST = between(0.0, 1e-5)
"""What code adds to a sum, so that it is not 0."""


_add_axes = operation("expand_dims", "stop_gradient")


def _keep_from_0(y: Pattern) -> Pattern:
    return any_of(_add_axes(y), y + _LEAST, operation("maximum")(y, _LEAST))


_exp, _sum, _X = operation("exp"), operation("reduce_sum"), tensor("x")
_LARGEST = operation("reduce_max")(repeated(_add_axes, _X), argument("axis of the largest"))
_BELOW = _X - repeated(_add_axes, _LARGEST).named("largest")
_TOTAL_BELOW, _TOTAL = (_sum(_exp(x), argument("axis")) for x in (_BELOW, _X))


def _replace_by_softmax(match: Match, context: LoweringContext) -> list[Call]:
    x, axis = match.found["x"], _single_axis(match)
    reduced = [match.found[name] for name in ("total", "largest") if name in match.found]
    if axis is None or any(value.shape != _reduced(x, axis) for value in reduced):
        return []
    return [context.pattern(match.call, layers.Softmax, x, axis=axis)]


SOFTMAX_BY_HAND = Rule(
    any_of(
        _exp(_BELOW) / repeated(_keep_from_0, _TOTAL_BELOW).named("total"),
        _exp(_X) / repeated(_add_axes, _TOTAL).named("total"),
    ),
    _replace_by_softmax,
)
"""Masks of attention are recognized before a softmax, and its components need no ranges.

A sum of exponentials that is at least 1 may be kept from 0.
"""


def _subtract_largest(match: Match, context: LoweringContext) -> list[Call]:
    x, axis, call = match.found["x"], _single_axis(match), match.call
    is_below = x.producer is not None and any(Matcher().find(_BELOW, x.producer))
    if axis is None or is_below:
        return []
    parts, add = PartsBuilder(call, context), operation_class()
    largest, _, logarithm = log_sum(parts, x, axis)
    if call.output.shape == largest.shape:
        return parts.end(parts.new("", add, tf.math.add), largest, logarithm)
    y = parts.add(parts.new("sum", add, tf.math.add), largest, logarithm, shape=largest.shape)
    return parts.end(parts.new("", add, tf.squeeze), y, kwargs={"axis": [axis]})


LOG_SUM_EXP = Rule(operation("log")(_TOTAL), _subtract_largest)
"""Subtracts the largest of x in log(sum(exp(x))), because 8 bits of exp(x) keep little else."""


def _single_axis(match: Match) -> int | None:
    """Return the axis that a pattern reduces along; None for several."""
    (axis, *others) = tf.nest.flatten(match.found["axis"])
    if others or read_scalar(axis) is None:
        return None
    return int(axis) % len(match.found["x"].shape)


def _reduced(x: Value, axis: int) -> tuple[int | None, ...]:
    return (*x.shape[:axis], 1, *x.shape[axis + 1 :])


def log_sum(parts: PartsBuilder, x: Value, axis: int | None) -> tuple[Value, Value, Value]:
    """Adds parts of log(sum(exp(x))): the largest of x, x less that, and the logarithm behind."""

    def add(part: str, function: Any, *values: Value, **kwargs: Any) -> Value:
        shape = _reduced(x, kwargs["axis"]) if kwargs else values[0].shape
        layer = parts.new(part, operation_class(), function)
        return parts.add(layer, *values, kwargs=kwargs, shape=shape)

    along = {"axis": axis, "keepdims": True}
    largest = add("largest", tf.reduce_max, x, **along)
    below = add("below", tf.math.subtract, x, largest)
    total = add("total", tf.reduce_sum, add("exp", tf.exp, below), **along)
    return largest, below, add("log", tf.math.log, total)


def split_softmax(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a softmax over several axes to one over a single axis that holds them."""
    axis, shape = call.layer.axis, call.inputs[0].shape
    rank = len(shape)
    axes = sorted(a % rank for a in axis) if isinstance(axis, (list, tuple)) else []
    if len(axes) < 2 or axes[0] == 0 or None in shape[1:] or len(call.inputs) > 1:
        return []
    order = [a for a in range(1, rank) if a not in axes] + axes
    sizes: list[Any] = [shape[a] for a in order]
    parts, kept = PartsBuilder(call, context), sizes[: -len(axes)]
    return parts.chain(
        parts.new("in_order", layers.Permute, order),
        parts.new("flat", layers.Reshape, (*kept, -1)),
        parts.new("softmax", layers.Softmax, -1),
        parts.new("shape", layers.Reshape, sizes),
        parts.new("", layers.Permute, [order.index(a) + 1 for a in range(1, rank)]),
    )


def softmax_of_many(call: Call, context: LoweringContext, has_int16: bool = True) -> list[Call]:
    """Lowers a softmax of so many numbers that 8 bits keep little or nothing of their mean."""
    op, attributes, _ = match_row(call)
    if op is not SOFTMAX or NO_WIDE:
        return []
    axis = attributes["axis"]
    sizes = call.output.shape[1:]
    count = call.output.shape[axis] or 0
    takes_no_time = has_int16 and None not in sizes and math.prod(sizes) <= FEW_IN_ALL  # type: ignore[arg-type]
    if count <= (SOME if takes_no_time else MANY):
        return []
    return replace_by(call, context, SoftmaxOfMany, axis)
