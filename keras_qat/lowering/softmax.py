"""Recognizes a softmax that a model computes with several operations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, values_in
from keras_qat.graph.operations import is_operation, kind_of
from keras_qat.graph.structural_keys import StructuralKeys
from keras_qat.graph.tf_operations import argument, number, operands, operation_class
from keras_qat.helper_layers.finite_functions import SoftmaxOfMany
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, replace_by
from keras_qat.ops.composed import NO_WIDE
from keras_qat.ops.registry import match
from keras_qat.ops.softmax import SOFTMAX
from keras_qat.ops.softmax_of_many import FEW_IN_ALL, MANY, SOME


def recognize_softmax(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces every exp(x) / sum(exp(x)), also of x - max(x), by one Softmax layer.

    So masks of attention are recognized in front of it, and the parts need no ranges.
    """
    readers, outputs = graph.consumers(), set(values_in(graph.outputs))
    keys, replaced = StructuralKeys(), dict[Call, Call]()
    dropped: set[Call] = set()
    for call in graph.calls:
        x, axis, inner = _inside(call, keys)
        members, hidden = {call, *inner}, {part.output for part in inner}
        if x is None or hidden & outputs or any(set(readers[value]) - members for value in hidden):
            continue
        replaced[call] = context.pattern(call, layers.Softmax, x, axis=axis)
        dropped.update(inner)
    calls = [replaced.get(call, call) for call in graph.calls if call not in dropped]
    return dataclasses.replace(graph, calls=calls)


def recognize_log_sum_exp(graph: Graph, context: LoweringContext) -> Graph:
    """Subtracts the largest number of x in log(sum(exp(x))), of which 8 bits keep little else."""
    readers, outputs = graph.consumers(), set(values_in(graph.outputs))
    keys, replaced = StructuralKeys(), dict[Call, list[Call]]()
    for call in graph.calls:
        total = call.inputs[0].producer if _kind(call) == "log" else None
        axis = _axis(total, "reduce_sum")
        exponential = total.inputs[0].producer if total and axis else None
        if total is None or exponential is None or _kind(exponential) != "exp":
            continue
        inner, (x,) = (total, exponential), exponential.inputs
        is_read = any(part.output in outputs or len(readers[part.output]) > 1 for part in inner)
        if is_read or _without_shift(x, keys)[1] is not None:
            continue
        parts = PartsBuilder(call, context)
        largest, _, logarithm = log_sum(parts, x, axis)
        add = operation_class()
        if call.output.shape == largest.shape:
            parts.end(parts.new("", add, tf.math.add), largest, logarithm)
        else:
            y = parts.add(
                parts.new("sum", add, tf.math.add), largest, logarithm, shape=largest.shape
            )
            parts.end(parts.new("", add, tf.squeeze), y, kwargs={"axis": [axis]})
        replaced.update({call: parts.calls, total: [], exponential: []})
    calls = [part for call in graph.calls for part in replaced.get(call, [call])]
    return dataclasses.replace(graph, calls=calls)


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


def _inside(call: Call, keys: StructuralKeys) -> tuple[Value | None, int, list[Call]]:
    """Returns the input, the axis and the other calls of a softmax that ends in `call`; or None."""
    nothing = None, 0, list[Call]()
    if _kind(call) != "divide" or len(call.inputs) != 2:
        return nothing
    exponential, total = call.inputs[0].producer, call.inputs[1]
    is_kept_from_0 = False
    while (step := total.producer) and _kind(step) in ("expand", "add", "maximum"):
        if _kind(step) != "expand":
            is_kept_from_0 = True
            if not _is_small(step):
                return nothing
        (total,) = step.inputs
    axis = _axis(step, "reduce_sum")
    if exponential is None or _kind(exponential) != "exp" or step is None or axis is None:
        return nothing
    (x,), exponentials = exponential.inputs, step.inputs[0]
    if not keys.is_same(exponentials, call.inputs[0]) or call.inputs[1].shape != _reduced(x, axis):
        return nothing
    below, shift = _without_shift(x, keys)
    is_of_axis = shift is not None and shift.shape == _reduced(x, axis)
    if is_kept_from_0 and not is_of_axis:  # A sum of exponentials from 1 on needs no such number.
        return nothing
    x = below if is_of_axis else x
    return x, axis, _between(x, call, keys)


LEAST = 1e-5
"""What code adds to a sum, so that it is not 0, is at most this."""


def _kind(call: Call | None) -> str:
    if call is None or not is_operation(call.layer):
        return ""
    key = tf.nest.flatten(call.args[1:]) if kind_of(call) == "getitem" else []
    if key and all(item is None or item is Ellipsis for item in key):
        return "expand"  # x[:, tf.newaxis]
    return "expand" if kind_of(call) in ("expand_dims", "stop_gradient") else kind_of(call)


def _is_small(call: Call) -> bool:
    """Returns whether one operand is a number that keeps the other one from 0."""
    numbers = [number(term) for term in operands(call, "x", "y") if not isinstance(term, Value)]
    return len(numbers) == 1 and numbers[0] is not None and 0 <= numbers[0] <= LEAST


def _axis(call: Call | None, kind: str) -> int | None:
    """Returns the axis along which a call reduces what it reads; None if it does not."""
    if call is None or _kind(call) != kind:
        return None
    axis = argument(call, "axis")
    axes: Any = axis if isinstance(axis, (list, tuple)) else [axis]
    if len(axes) != 1 or number(axes[0]) is None:
        return None
    return int(axes[0]) % len(call.inputs[0].shape)


def _reduced(x: Value, axis: int) -> tuple[int | None, ...]:
    return (*x.shape[:axis], 1, *x.shape[axis + 1 :])


def _without_shift(x: Value, keys: StructuralKeys) -> tuple[Value, Value | None]:
    """Returns y and max(y), given a tensor y - max(y); else the tensor and None."""
    shifted = x.producer
    if shifted is None or _kind(shifted) != "subtract" or len(shifted.inputs) != 2:
        return x, None
    y, shift = shifted.inputs
    largest = _unexpanded(shift).producer
    if largest is None or _axis(largest, "reduce_max") is None:
        return x, None
    return (y, shift) if keys.is_same(_unexpanded(largest.inputs[0]), y) else (x, None)


def _unexpanded(value: Value) -> Value:
    """Returns what a tensor was before axes of one number were added, and gradients stopped."""
    while (call := value.producer) and _kind(call) == "expand":
        (value,) = call.inputs
    return value


def _between(x: Value, call: Call, keys: StructuralKeys) -> list[Call]:
    """Returns the calls that compute from `x` what a call reads."""
    found: dict[Call, None] = {}
    values = list(call.inputs)
    while values:
        producer = None if keys.is_same(value := values.pop(), x) else value.producer
        if producer is not None and producer not in found:
            found[producer] = None
            values += producer.inputs
    return list(found)


def softmax_of_many(call: Call, context: LoweringContext, has_int16: bool = True) -> list[Call]:
    """Lowers a softmax of so many numbers that 8 bits keep little or nothing of their mean."""
    op, attributes, _ = match(call)
    if op is not SOFTMAX or NO_WIDE:
        return []
    axis = attributes["axis"]
    sizes = call.output.shape[1:]
    count = call.output.shape[axis] or 0
    takes_no_time = has_int16 and None not in sizes and math.prod(sizes) <= FEW_IN_ALL  # type: ignore[arg-type]
    if count <= (SOME if takes_no_time else MANY):
        return []
    return replace_by(call, context, SoftmaxOfMany, axis)
