"""Expands sums, variances, norms and normalization layers.

Sums and norms become means, products and roots. A normalization of other axes than the last becomes
a normalization of the last axes, between two Permute layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.helper_layers.elementwise_functions import Formula
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.expand_call import Expansion, is_tensor, require
from keras_qat.ops.movement import read_axes

IN_INTEGERS = layers.LayerNormalization, layers.GroupNormalization
"""Layers that are expanded only if the user's recipe requests integers for them."""


def _normalize(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Expand a normalization of other axes than the last: Permute, normalize, and Permute back."""
    rank = len(x.shape)
    axes = [axis % rank for axis in tf.nest.flatten([layer.axis])]
    others = [axis for axis in range(rank) if axis not in axes]
    order, is_list = [*others, *axes], isinstance(layer.axis, (list, tuple))
    require(len(axes) == 1 or not isinstance(layer, layers.UnitNormalization))
    require(layer.activity_regularizer is None and order != sorted(order))
    require(0 not in axes and axes == sorted(axes))
    last = list(range(len(others), rank))
    x = layers.Permute(order[1:], name="turned")(x)
    x = clone(layer, axis=last if is_list else last[0])(x)
    return layers.Permute([order.index(axis) for axis in range(1, rank)], name="turned_back")(x)


def _normalize_batch(layer: keras.layers.Layer, x: tf.Tensor, **options: object) -> tf.Tensor:
    """Expand a BatchNormalization of other axes than the last.

    The input is reshaped to [batch, rows, channels]. It is not reshaped to images, because Keras
    updates the moving variance of images differently.
    """
    shape, rank = x.shape, len(x.shape)
    axes = sorted(axis % rank for axis in tf.nest.flatten([layer.axis]))
    others = [axis for axis in range(rank) if axis not in axes]
    require(axes != [rank - 1] and not {0, None} & {*axes, *shape[1:]})
    require(not layer.activity_regularizer)
    order = [*others, *axes]
    sizes = [shape[axis] for axis in order[1:]]
    rows = [math.prod(sizes[: len(others) - 1])] if others[1:] else []
    is_turned = order != sorted(order)
    x = layers.Permute(order[1:], name="turned")(x) if is_turned else x
    x = clone(layer, axis=-1)(layers.Reshape((*rows, -1), name="joined")(x), **options)
    x = layers.Reshape(sizes, name="parted")(x)
    back = [order.index(axis) for axis in range(1, rank)]
    return layers.Permute(back, name="turned_back")(x) if is_turned else x


LAYERS: dict[type, Expansion] = {
    **dict.fromkeys((layers.UnitNormalization, *IN_INTEGERS), _normalize),
    layers.BatchNormalization: _normalize_batch,
}


def scale(x: tf.Tensor, factor: float, **options: object) -> tf.Tensor:
    """Multiply by a number, with a Rescaling layer if possible."""
    if len(x.shape) > 1 and x.shape[0] is None:
        return layers.Rescaling(factor, **options)(x)
    return tf.multiply(x, np.float32(factor), **options)


def _read_axes(x: tf.Tensor, axis: Any) -> list[int]:
    axes = list(read_axes(axis, len(x.shape)) or ())
    require(axes and None not in [x.shape[axis] for axis in axes])
    return axes


def _sum(input_tensor: tf.Tensor, axis: Any = None, keepdims: bool = False) -> tf.Tensor:
    if isinstance(input_tensor, (list, tuple)):
        return _merge(input_tensor, axis, keepdims, merge=layers.Add)
    axes = _read_axes(input_tensor, axis)
    mean = tf.reduce_mean(input_tensor, axis=axes, keepdims=bool(keepdims), name="mean")
    return scale(mean, float(math.prod(input_tensor.shape[axis] for axis in axes)))


def _merge(
    input_tensor: tf.Tensor, axis: Any = None, keepdims: bool = False, *, merge: Callable[..., Any]
) -> tf.Tensor:
    """Expand a reduction of a list: `tf.reduce_sum([a, b], 0)` becomes `Add()([a, b])`."""
    require(isinstance(input_tensor, (list, tuple)) and len(input_tensor) > 1)
    require(axis in (0, [0], (0,)) and not keepdims and all(map(is_tensor, input_tensor)))
    return merge()(list(input_tensor))


def _variance(input_tensor: tf.Tensor, axis: Any = None, keepdims: bool = False) -> tf.Tensor:
    axes = _read_axes(input_tensor, axis)
    mean = tf.reduce_mean(input_tensor, axis=axes, keepdims=True, name="mean")
    difference = tf.subtract(input_tensor, mean, name="less")
    squares = tf.square(difference, name="square")
    return tf.reduce_mean(squares, axis=axes, keepdims=bool(keepdims), name="variance")


def _norm(
    tensor: tf.Tensor, ord: Any = None, axis: Any = None, keepdims: bool | None = None
) -> tf.Tensor:
    require(axis is not None)
    axes = _read_axes(tensor, axis)
    require(ord in (None, "euclidean") or (ord, len(axes)) in ((2, 1), ("fro", 2)))
    squares = tf.square(tensor, name="square")
    mean = tf.reduce_mean(squares, axis=axes, keepdims=bool(keepdims), name="mean")
    size = math.prod(tensor.shape[axis] for axis in axes)
    return tf.sqrt(mean, name="root") * np.float32(size**0.5)


def _center_and_log_sum(x: tf.Tensor, axis: Any) -> tuple[tf.Tensor, tf.Tensor]:
    below = x - tf.reduce_max(x, axis, keepdims=True)
    return below, tf.math.log(tf.reduce_sum(tf.exp(below), axis, keepdims=True))


def _log_softmax(logits: tf.Tensor, axis: Any = None) -> tf.Tensor:
    below, total = _center_and_log_sum(logits, -1 if axis is None else axis)
    return below - total


def _log_sum_exp(input_tensor: tf.Tensor, axis: Any = None, keepdims: bool = False) -> tf.Tensor:
    require(axis is not None)
    largest = tf.reduce_max(input_tensor, axis, keepdims=True)
    y = largest + _center_and_log_sum(input_tensor, axis)[1]
    return y if keepdims else tf.squeeze(y, axis)


_LOG_OF_ONE_MORE = '["softplus", ["negative", ["abs", "x"]]]'


def _cumulative_log_sum_exp(
    x: tf.Tensor, axis: Any = 0, exclusive: bool = False, reverse: bool = False
) -> tf.Tensor:
    """Combine each value with the value 1 position before, then 2, 4 and so on.

    Values are combined by log(exp(a) + exp(b)) = max(a, b) + log(1 + exp(-|a - b|)). The last term
    is at most log(2), so 8 bits are enough. The first result of an exclusive sum would be -inf. The
    minimum of the other results replaces it.
    """
    require(isinstance(axis, int) and axis % len(x.shape) != 0 and (x.shape[axis] or 0) > 1)
    axis, size = axis % len(x.shape), x.shape[axis]

    def split(y: tf.Tensor, count: int) -> tf.Tensor:
        return tf.split(y, [count, y.shape[axis] - count], axis)

    y = tf.reverse(x, [axis]) if reverse else x
    y = split(y, size - 1)[0] if exclusive else y
    for power in range((y.shape[axis] - 1).bit_length()):
        (first, later), (earlier, _) = split(y, 2**power), split(y, y.shape[axis] - 2**power)
        rest = Formula(_LOG_OF_ONE_MORE)(later - earlier)
        y = tf.concat([first, tf.maximum(later, earlier) + rest], axis)
    if exclusive:
        y = tf.concat([tf.reduce_min(y, axis, keepdims=True), y], axis)
    return tf.reverse(y, [axis]) if reverse else y


def _multiply_few(input_tensor: tf.Tensor, axis: Any = None, keepdims: bool = False) -> tf.Tensor:
    require(isinstance(axis, int) and (input_tensor.shape[axis] or 99) <= 8)
    first, *rest = tf.unstack(input_tensor, axis=axis)
    for factor in rest:
        first = first * factor
    return tf.expand_dims(first, axis) if keepdims else first


EARLY: dict[str, Expansion] = {
    "log_softmax": _log_softmax,
    "reduce_logsumexp": _log_sum_exp,
    "cumulative_logsumexp": _cumulative_log_sum_exp,
    "reduce_euclidean_norm": lambda input_tensor, axis=None, keepdims=False: tf.norm(
        input_tensor, axis=axis, keepdims=keepdims
    ),
    "reduce_prod": _multiply_few,
}

OF_FLOATS: dict[str, Expansion] = {
    "reduce_sum": _sum,
    "reduce_mean": partial(_merge, merge=layers.Average),
    "reduce_max": partial(_merge, merge=layers.Maximum),
    "reduce_min": partial(_merge, merge=layers.Minimum),
    "reduce_variance": _variance,
    "reduce_std": lambda *args, **options: tf.sqrt(_variance(*args, **options)),
    "norm": _norm,
}
