"""Expands sums, variances and norms to means, products and roots."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import layers
from keras_qat.lowering.expand_call import Expansion, is_tensor, require
from keras_qat.ops.movement import axes_of


def scale(x: Any, factor: float, **options: Any) -> Any:
    """Multiply by a number: with a layer, which other passes fold, if there are channels."""
    if len(x.shape) > 1 and x.shape[0] is None:
        return layers.Rescaling(factor, **options)(x)
    return tf.multiply(x, np.float32(factor), **options)


def _known_axes(x: Any, axis: Any) -> list[int]:
    """Return the axes to reduce, whose sizes have to be known."""
    axes = list(axes_of(axis, len(x.shape)) or ())
    require(axes and None not in [x.shape[axis] for axis in axes])
    return axes


def _sum(input_tensor: Any, axis: Any = None, keepdims: Any = False, name: Any = None) -> Any:
    if isinstance(input_tensor, (list, tuple)):
        return _merge(input_tensor, axis, keepdims, merge=layers.Add)
    axes = _known_axes(input_tensor, axis)
    mean = tf.reduce_mean(input_tensor, axis=axes, keepdims=bool(keepdims), name="mean")
    return scale(mean, float(math.prod(input_tensor.shape[axis] for axis in axes)))


def _merge(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: Any = None, *, merge: Any
) -> Any:
    """Merge a list of tensors, which the operation would stack along axis 0."""
    require(isinstance(input_tensor, (list, tuple)) and len(input_tensor) > 1)
    require(axis in (0, [0], (0,)) and not keepdims and all(map(is_tensor, input_tensor)))
    return merge()(list(input_tensor))


def _variance(input_tensor: Any, axis: Any = None, keepdims: Any = False, name: Any = None) -> Any:
    axes = _known_axes(input_tensor, axis)
    mean = tf.reduce_mean(input_tensor, axis=axes, keepdims=True, name="mean")
    difference = tf.subtract(input_tensor, mean, name="less")
    squares = tf.square(difference, name="square")
    return tf.reduce_mean(squares, axis=axes, keepdims=bool(keepdims), name="variance")


def _deviation(input_tensor: Any, axis: Any = None, keepdims: Any = False, name: Any = None) -> Any:
    return tf.sqrt(_variance(input_tensor, axis, keepdims))


def _norm(
    tensor: Any, ord: Any = None, axis: Any = None, keepdims: Any = None, name: Any = None
) -> Any:
    require(axis is not None)
    axes = _known_axes(tensor, axis)
    require(ord in (None, "euclidean") or (ord, len(axes)) in ((2, 1), ("fro", 2)))
    squares = tf.square(tensor, name="square")
    mean = tf.reduce_mean(squares, axis=axes, keepdims=bool(keepdims), name="mean")
    size = math.prod(tensor.shape[axis] for axis in axes)
    return tf.sqrt(mean, name="root") * np.float32(size**0.5)


STATISTICS: dict[str, Expansion] = {
    "reduce_sum": _sum,
    "reduce_mean": partial(_merge, merge=layers.Average),
    "reduce_max": partial(_merge, merge=layers.Maximum),
    "reduce_min": partial(_merge, merge=layers.Minimum),
    "reduce_variance": _variance,
    "reduce_std": _deviation,
    "norm": _norm,
}
