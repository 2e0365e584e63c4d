"""Expands pooling of volumes to pooling of images."""

from __future__ import annotations

from functools import partial
from typing import Any

from keras_qat.helper_layers.operations import FlattenTime, RestoreTime
from keras_qat.keras2.backend import layers
from keras_qat.lowering.expand_call import Expansion, require


def _pool_volumes(layer: Any, x: Any, *, pooling: Any) -> Any:
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


POOLING_LAYERS: dict[type, Expansion] = {
    layers.AveragePooling3D: partial(_pool_volumes, pooling=layers.AveragePooling2D),
    layers.MaxPooling3D: partial(_pool_volumes, pooling=layers.MaxPooling2D),
}
"""Layer class -> a function of the layer and its input."""
