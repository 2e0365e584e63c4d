"""Expands pooling and convolutions of volumes to operations on images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.helper_layers.operations import FlattenTime, RestoreTime
from keras_qat.keras2.backend import keras, layers
from keras_qat.lowering.expand_call import Expansion, require
from keras_qat.lowering.expansions.keras_layers import convolve_volumes
from keras_qat.ops.movement import read_window


def _pool_volumes(
    layer: keras.layers.Layer, x: tf.Tensor, *, pooling: Callable[..., Any]
) -> tf.Tensor:
    """Pool every slice, and then along the slices."""
    (_, depth, _, _, channels), padding = x.shape, layer.padding
    _, new_depth, *new_sizes, _ = layer.compute_output_shape(x.shape)
    require(None not in (new_depth, *new_sizes))
    (pool_depth, *pool), (stride_depth, *strides) = layer.pool_size, layer.strides
    x = FlattenTime(name="fold")(x)
    x = pooling(pool, strides, padding, name="slices")(x)
    x = RestoreTime(depth, name="unfold")(x)
    x = layers.Reshape((depth, new_sizes[0] * new_sizes[1], channels), name="flat")(x)
    x = pooling((pool_depth, 1), (stride_depth, 1), padding, name="depth")(x)
    return layers.Reshape((new_depth, *new_sizes, channels))(x)


def _convolve_separably(
    input: tf.Tensor,
    depthwise_filter: tf.Tensor,
    pointwise_filter: tf.Tensor,
    strides: Any,
    padding: str,
    **dilations: Any,
) -> tf.Tensor:
    y = tf.nn.depthwise_conv2d(input, depthwise_filter, strides, padding, **dilations)
    return tf.nn.conv2d(y, pointwise_filter, 1, "VALID")


def _convolve_volumes(
    input: tf.Tensor, filters: tf.Tensor, strides: Any, padding: str, dilations: Any = 1
) -> tf.Tensor:
    sizes = [read_window(option, 3) for option in (strides, dilations)]
    require(None not in [*sizes, *input.shape[1:]])
    return convolve_volumes(input, filters, sizes[0], padding, sizes[1])


EARLY: dict[str, Expansion] = {
    "separable_conv2d": _convolve_separably,
    "conv3d": _convolve_volumes,
}

LAYERS: dict[type, Expansion] = {
    layers.AveragePooling3D: partial(_pool_volumes, pooling=layers.AveragePooling2D),
    layers.MaxPooling3D: partial(_pool_volumes, pooling=layers.MaxPooling2D),
}
