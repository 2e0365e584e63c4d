"""Lowers slices of tensors with more axes than kernels take, and sizes in reverse order."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.graph.tf_operations import operation_class
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.movement import MAX_SLICED
from keras_qat.ops.slicing import FULL_SLICE, SLICE


def split_reversed_sizes(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers sizes[::-1] to tf.reverse: Keras does not infer the shape of the slice if one is open.

    YOLO's code computes such sizes of its feature maps, as (width, height).
    """
    (x, *others), parts = call.inputs, SLICE.attributes(call)["parts"]
    is_vector = len(x.shape) == len(call.output.shape) == 1
    if x.is_float or not is_vector or others or parts != ((None, None, -1),):
        return []
    builder = PartsBuilder(call, context)
    return builder.end(builder.new("", operation_class(), tf.reverse), x, [0])


def split_many_axes(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a slice of many axes to slices along one each, with those around it joined."""
    x, attributes = call.inputs[0], SLICE.attributes(call)
    ranges = attributes["parts"]
    is_known = None not in (*x.shape[1:], *call.output.shape[1:]) and len(call.inputs) == 1
    if len(x.shape) <= MAX_SLICED or not is_known or not ranges or ranges[0] != (None, None, 1):
        return []
    parts, operation = PartsBuilder(call, context), type(call.layer)

    def reshape(x: Any, name: str, sizes: Any) -> Any:
        layer = parts.new(name, operation_class(), tf.reshape)
        return parts.add(layer, x, [-1, *sizes], shape=(None, *sizes))

    sizes: list[Any] = list(x.shape)
    for axis, (start, stop, step) in enumerate(ranges):
        if axis in attributes["dropped"]:
            stop = start + 1 or None
        left = len(range(*slice(start, stop, step).indices(sizes[axis]))) if axis else None
        if left in (None, sizes[axis]) and step == 1:
            continue
        around = math.prod(sizes[1:axis]), math.prod(sizes[axis + 1 :])
        x = reshape(x, f"joined_{axis}", (around[0], sizes[axis], around[1]))
        part = parts.new(f"part_{axis}", operation, tf.__operators__.getitem)
        key = FULL_SLICE, FULL_SLICE, {"start": start, "stop": stop, "step": step}
        sizes[axis] = left
        x = parts.add(part, x, key, shape=(None, around[0], left, around[1]))
    return parts.end(parts.new("", operation_class(), tf.reshape), x, [-1, *call.output.shape[1:]])
