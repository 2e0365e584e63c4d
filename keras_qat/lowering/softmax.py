"""Recognizes a softmax that a model computes with several operations."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_qat.frontend.graph import Call, Graph, Value, values_in
from keras_qat.frontend.keras2.backend import layers
from keras_qat.frontend.tf_operations import ARITHMETIC, is_operation, number, operands
from keras_qat.lowering.builder import LoweringContext, PartsBuilder


def recognize_softmax(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces every exp(x - max(x)) / sum(exp(x - max(x))) by one Softmax layer.

    So masks of attention are recognized in front of it, and the parts need no ranges.
    """
    readers, outputs = graph.consumers(), set(values_in(graph.outputs))
    replaced: dict[Call, Call] = {}
    dropped: set[Call] = set()
    for call in graph.calls:
        x, axis, inner = _inside(call)
        members, hidden = {call, *inner}, {part.output for part in inner}
        if x is None or hidden & outputs or any(set(readers[value]) - members for value in hidden):
            continue
        replaced[call] = context.pattern(call, layers.Softmax, x, axis=axis)
        dropped.update(inner)
    calls = [replaced.get(call, call) for call in graph.calls if call not in dropped]
    return dataclasses.replace(graph, calls=calls)


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


def _inside(call: Call) -> tuple[Value | None, int, list[Call]]:
    """Returns the input, the axis and the other calls of a softmax that ends in `call`; or None."""
    nothing = None, 0, list[Call]()
    if _kind(call) != "divide" or len(call.inputs) != 2:
        return nothing
    exponential, total = (value.producer for value in call.inputs)
    if exponential is None or total is None or _kind(exponential) != "exp":
        return nothing
    axis = _kept_axis(total, "sum", exponential.output)
    shifted = exponential.inputs[0].producer
    if axis is None or shifted is None or _kind(shifted) != "subtract":
        return nothing
    if len(shifted.inputs) != 2 or (largest := shifted.inputs[1].producer) is None:
        return nothing
    x = shifted.inputs[0]
    if _kept_axis(largest, "max", x) != axis:
        return nothing
    return x, axis, [exponential, total, shifted, largest]


_KINDS = {**ARITHMETIC, "math.exp": "exp", "math.reduce_sum": "sum", "math.reduce_max": "max"}


def _kind(call: Call) -> str:
    return _KINDS.get(str(call.layer.symbol), "") if is_operation(call.layer) else ""


def _kept_axis(call: Call, kind: str, x: Value) -> int | None:
    """Returns the axis along which a call reduces `x`, which it keeps; None if it does not."""
    if _kind(call) != kind or call.inputs != [x]:
        return None
    _, axis, keeps = operands(call, "input_tensor", "axis", "keepdims")
    axes: Any = axis if isinstance(axis, (list, tuple)) else [axis]
    if not keeps or len(axes) != 1 or number(axes[0]) is None:
        return None
    return int(axes[0]) % len(x.shape)
