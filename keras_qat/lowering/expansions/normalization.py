"""Expands layers that normalize along other axes to layers along the last axes, as operators do."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.expand_call import Expansion, require

IN_INTEGERS = layers.LayerNormalization, layers.GroupNormalization
"""Layers that are expanded only if they are computed in integers."""

MOST_AXES = 5
"""Most axes of a tensor that the operators support."""


def _normalize(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Normalize along the last axes, between two Permutes."""
    rank = len(x.shape)
    axes = [axis % rank for axis in tf.nest.flatten([layer.axis])]
    others = [axis for axis in range(rank) if axis not in axes]
    order, is_list = [*others, *axes], isinstance(layer.axis, (list, tuple))
    require(len(axes) == 1 or not isinstance(layer, layers.UnitNormalization))
    require(layer.activity_regularizer is None)
    if order == sorted(order):
        require(rank > MOST_AXES and type(layer) in IN_INTEGERS and len(others) > 1)
        return _merge_other_axes(
            layer, x, len(others), list(range(-len(axes), 0)) if is_list else -1
        )
    require(0 not in axes and axes == sorted(axes))
    last = list(range(len(others), rank))
    x = layers.Permute(order[1:], name="turned")(x)
    x = clone(layer, axis=last if is_list else last[0])(x)
    return layers.Permute([order.index(axis) for axis in range(1, rank)], name="turned_back")(x)


def _merge_other_axes(layer: keras.layers.Layer, x: tf.Tensor, count: int, axis: Any) -> tf.Tensor:
    """Normalize a tensor after merging its first `count` axes without the batch."""
    sizes = x.shape[1:]
    require(None not in sizes)
    rows, last = math.prod(sizes[: count - 1]), sizes[count - 1 :]
    x = layers.Reshape((rows, *last), name="joined")(x)
    return layers.Reshape(sizes, name="parted")(clone(layer, axis=axis)(x))


def _normalize_batch(layer: keras.layers.Layer, x: tf.Tensor, **options: object) -> tf.Tensor:
    """Normalize along the last of two axes.

    Keras normalizes images along the last axis by an operation that moves the variance otherwise.
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
