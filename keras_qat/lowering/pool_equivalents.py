"""TensorFlow's rarer operations on windows of images, written out for `equivalents`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.frontend.keras2.backend import layers
from keras_qat.lowering.written_out import convolved_volumes, require
from keras_qat.ops.movement import window


def _separable(
    input: Any,
    depthwise_filter: Any,
    pointwise_filter: Any,
    strides: Any,
    padding: Any,
    rate: Any = None,
    name: Any = None,
    data_format: Any = None,
    dilations: Any = None,
) -> Any:
    require(data_format in (None, "NHWC"))
    dilations = dilations if rate is None else rate
    y = tf.nn.depthwise_conv2d(input, depthwise_filter, strides, padding, dilations=dilations)
    return tf.nn.conv2d(y, pointwise_filter, 1, "VALID")


def _pooled(
    input: Any,
    window_shape: Any,
    pooling_type: Any,
    padding: Any = "VALID",
    dilation_rate: Any = None,
    strides: Any = None,
    name: Any = None,
    data_format: Any = None,
    dilations: Any = None,
) -> Any:
    require(set(tf.nest.flatten((dilation_rate, dilations))) <= {None, 1})
    require(not str(data_format or "").startswith("NC"))
    axes = len(input.shape) - 2
    pools = (_MAXIMA if pooling_type == "MAX" else _AVERAGES)[axes]
    return pools(window_shape, strides or 1, padding)(input)


def _pool_of_volumes(pools: Any) -> Callable[..., Any]:
    def pooled(
        input: Any,
        ksize: Any,
        strides: Any,
        padding: Any,
        data_format: Any = None,
        name: Any = None,
    ) -> Any:
        sizes = [window(option, 3) for option in (ksize, strides)]
        require(data_format in (None, "NDHWC") and None not in sizes)
        return pools(*sizes, padding)(input)

    return pooled


def _convolved_volumes(
    input: Any,
    filters: Any,
    strides: Any,
    padding: Any,
    data_format: Any = "NDHWC",
    dilations: Any = None,
    name: Any = None,
) -> Any:
    sizes = [window(option or 1, 3) for option in (strides, dilations)]
    require(data_format == "NDHWC" and None not in [*sizes, *input.shape[1:]])
    return convolved_volumes(input, filters, sizes[0], padding, sizes[1])


_MAXIMA = {1: layers.MaxPooling1D, 2: layers.MaxPooling2D, 3: layers.MaxPooling3D}
_AVERAGES = {1: layers.AveragePooling1D, 2: layers.AveragePooling2D, 3: layers.AveragePooling3D}

POOLS: dict[str, Callable[..., Any]] = {
    "nn.separable_conv2d": _separable,
    "nn.conv3d": _convolved_volumes,
    "nn.pool": _pooled,
    "nn.max_pool3d": _pool_of_volumes(layers.MaxPooling3D),
    "nn.avg_pool3d": _pool_of_volumes(layers.AveragePooling3D),
}
"""TensorFlow's name of an operation -> a function that takes its arguments."""
