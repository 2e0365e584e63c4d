"""Turns axes, so that layers normalize along the last ones, as their operators do."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder

IN_INTEGERS = layers.LayerNormalization, layers.GroupNormalization
"""Layers that are turned only where they are computed in integers."""

MOST_AXES = 5
"""Most axes of a tensor that their operators take."""


def along_last_axes(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a layer along other axes to the same along the last ones, between two Permutes."""
    layer, rank = call.layer, len(call.output.shape)
    axes = [axis % rank for axis in tf.nest.flatten([layer.axis])]
    if len(axes) > 1 and isinstance(layer, layers.UnitNormalization):
        return []
    others = [axis for axis in range(rank) if axis not in axes]
    order = [*others, *axes]
    if rank > MOST_AXES and order == sorted(order) and type(layer) in IN_INTEGERS:
        return _with_few_axes(call, context, len(axes))
    if (
        0 in axes
        or axes != sorted(axes)
        or order == sorted(order)
        or layer.activity_regularizer is not None
    ):
        return []
    last = list(range(len(others), rank))
    back = [order.index(axis) for axis in range(1, rank)]
    axis = last if isinstance(layer.axis, (list, tuple)) else last[0]
    parts = PartsBuilder(call, context)
    return parts.chain(
        parts.new("turned", layers.Permute, order[1:]),
        context.clone(layer, "last_axes", context.weights_of(layer), axis=axis),
        parts.new("turned_back", layers.Permute, back),
    )


def _with_few_axes(call: Call, context: LoweringContext, count: int) -> list[Call]:
    """Lowers a layer along the last axes to the same of a tensor whose other axes are joined."""
    layer = call.layer
    sizes: Any = call.output.shape[1:]
    if None in sizes or len(sizes) == count or layer.activity_regularizer is not None:
        return []
    last, parts = sizes[len(sizes) - count :], PartsBuilder(call, context)
    axis = list(range(-count, 0)) if isinstance(layer.axis, (list, tuple)) else -1
    rows = math.prod(sizes[: len(sizes) - count])
    return parts.chain(
        parts.new("joined", layers.Reshape, (rows, *last)),
        context.clone(layer, "last_axes", context.weights_of(layer), axis=axis),
        parts.new("parted", layers.Reshape, sizes),
    )


def along_one_last_axis(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers BatchNormalization along other or several axes to one along the last of two.

    Keras normalizes images along the last axis by an operation that moves the variance otherwise.
    """
    layer, shape = call.layer, call.output.shape
    rank = len(shape)
    axes = sorted(axis % rank for axis in tf.nest.flatten([layer.axis]))
    others = [axis for axis in range(rank) if axis not in axes]
    if axes == [rank - 1] or {0, None} & {*axes, *shape[1:]} or layer.activity_regularizer:
        return []
    order = [*others, *axes]
    sizes = [shape[axis] or 1 for axis in order[1:]]
    rows = [math.prod(sizes[: len(others) - 1])] if others[1:] else []
    parts = PartsBuilder(call, context)
    x = call.inputs[0]
    after = [parts.new("parted", layers.Reshape, sizes)]
    if order != sorted(order):
        back = [order.index(axis) for axis in range(1, rank)]
        x = parts.add(parts.new("turned", layers.Permute, order[1:]), x)
        after.append(parts.new("turned_back", layers.Permute, back))
    x = parts.add(parts.new("joined", layers.Reshape, (*rows, -1)), x)
    norm = context.clone(layer, "last_axes", context.weights_of(layer), axis=-1)
    x = parts.add(norm, x, kwargs=call.kwargs)
    for part in after[:-1]:
        x = parts.add(part, x)
    return parts.end(after[-1], x)
