"""Lowers deviations, variances, norms and sums to means, products and roots."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.tf_operations import operands
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import Lowering, LoweringContext, PartsBuilder, replace_by
from keras_qat.ops.movement import axes_of, integers


def split_sum(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a sum along axes of known sizes to a mean and a product."""
    x, axis, keepdims = operands(call, "input_tensor", "axis", "keepdims")
    if not isinstance(x, Value):
        return split_list(call, context, layers.Add)
    parts = PartsBuilder(call, context)
    return parts.calls if _add_sum(parts, x, axis, keepdims, call.output) else []


def _add_sum(parts: PartsBuilder, x: Value, axis: Any, keepdims: Any, output: Value) -> bool:
    """Adds a sum; returns whether its sizes are known."""
    axes = axes_of(axis, len(x.shape))
    sizes: list[Any] = [x.shape[a] for a in axes or ()]
    if not sizes or None in sizes:
        return False
    options = {"axis": list(axes or ()), "keepdims": bool(keepdims)}
    operation, factor = type(parts.call.layer), float(math.prod(sizes))
    mean = parts.new("mean", operation, tf.math.reduce_mean)
    middle = parts.add(mean, x, kwargs=options, shape=output.shape)
    if len(output.shape) > 1 and output.shape[0] is None:
        parts.add(parts.new("", layers.Rescaling, factor), middle, output=output)
    else:
        product = parts.new("", operation, tf.math.multiply)
        parts.add(product, middle, np.float32(factor), output=output)
    return True


def split_list(call: Call, context: LoweringContext, make: Any) -> list[Call]:
    """Lowers a reduction of a list of tensors, stacked along axis 0, to a merge layer."""
    tensors, axis, keepdims = operands(call, "input_tensor", "axis", "keepdims")
    are_several = isinstance(tensors, (list, tuple)) and len(tensors) > 1
    if not are_several or axis not in (0, [0], (0,)) or keepdims:
        return []
    if not all(isinstance(x, Value) and x.is_float for x in tensors):
        return []
    return replace_by(call, context, make, inputs=list(tensors))


def _split_deviation(call: Call, context: LoweringContext, root: bool) -> list[Call]:
    """Lowers tf.math.reduce_variance, and with `root` tf.math.reduce_std."""
    x, axis, keepdims = operands(call, "input_tensor", "axis", "keepdims")
    axes = axes_of(axis, len(x.shape))
    if not axes or None in [x.shape[a] for a in axes]:
        return []
    parts, operation = PartsBuilder(call, context), type(call.layer)
    reduced = [1 if a in axes else size for a, size in enumerate(x.shape)]
    mean = parts.new("mean", operation, tf.math.reduce_mean)
    along = {"axis": list(axes), "keepdims": True}
    middle = parts.add(mean, x, kwargs=along, shape=reduced)
    difference = parts.add(parts.new("less", layers.Subtract), [x, middle], shape=x.shape)
    square = parts.new("square", layers.Multiply)
    squares = parts.add(square, [difference, difference], shape=x.shape)
    variance = parts.new("variance" if root else "", operation, tf.math.reduce_mean)
    options = {"axis": list(axes), "keepdims": bool(keepdims)}
    if not root:
        return parts.end(variance, squares, kwargs=options)
    spread = parts.add(variance, squares, kwargs=options, shape=call.output.shape)
    return parts.end(parts.new("", operation, tf.math.sqrt), spread)


def _split_norm(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.norm, the root of a sum of squares."""
    names = ("tensor", "ord", "axis", "keepdims")
    x, order, axis, keepdims = operands(call, *names)
    axes = () if axis is None else integers(axis)
    is_length = order in (None, "euclidean") or (order, len(axes or ())) in ((2, 1), ("fro", 2))
    if not is_length or not axes or None in [x.shape[a] for a in axes]:
        return []
    parts, operation = PartsBuilder(call, context), type(call.layer)
    squares = parts.add(parts.new("square", layers.Multiply), [x, x], shape=x.shape)
    mean = parts.new("mean", operation, tf.math.reduce_mean)
    options = {"axis": list(axes), "keepdims": bool(keepdims)}
    middle = parts.add(mean, squares, kwargs=options, shape=call.output.shape)
    root = parts.add(parts.new("root", operation, tf.math.sqrt), middle, shape=middle.shape)
    product = parts.new("", operation, tf.math.multiply)
    return parts.end(product, root, np.float32(math.prod(x.shape[a] for a in axes) ** 0.5))


STATISTICS: dict[str, Lowering] = {
    "math.reduce_sum": split_sum,
    "math.reduce_mean": partial(split_list, make=layers.Average),
    "math.reduce_max": partial(split_list, make=layers.Maximum),
    "math.reduce_min": partial(split_list, make=layers.Minimum),
    "math.reduce_variance": partial(_split_deviation, root=False),
    "math.reduce_std": partial(_split_deviation, root=True),
    **dict.fromkeys(("norm", "linalg.norm", "compat.v1.norm"), _split_norm),
}
"""TensorFlow's name of an operation that measures tensors -> its lowering."""
