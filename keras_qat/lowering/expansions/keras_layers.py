"""Expands 3D convolutions and pooling, and a few other layers.

A volume is a sequence of slices, which are images. A Conv3D with a depth of 3 becomes a Conv2D of
three slices, concatenated along the channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.helper_layers.operations import FlattenTime, RestoreTime
from keras_qat.keras2.backend import keras, layers
from keras_qat.lowering.activations import merge_softmax_axes
from keras_qat.lowering.attention import expand_attention
from keras_qat.lowering.expand_call import Expansion, require
from keras_qat.ops.movement import read_window


def _pool_volumes(
    layer: keras.layers.Layer, x: tf.Tensor, *, pooling: Callable[..., Any]
) -> tf.Tensor:
    """Expand 3D pooling to 2D pooling of each slice, and then pooling along the depth."""
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


def _pool_by_layer(
    input: tf.Tensor,
    ksize: Any,
    strides: Any,
    padding: str = "VALID",
    *,
    pooling: Callable[..., Any],
) -> tf.Tensor:
    sizes = [read_window(option, 3) for option in (ksize, strides)]
    require(None not in sizes)
    return pooling(*sizes, padding)(input)


EARLY: dict[str, Expansion] = {
    "separable_conv2d": _convolve_separably,
    "conv3d": _convolve_volumes,
    "max_pool3d": partial(_pool_by_layer, pooling=layers.MaxPooling3D),
    "avg_pool3d": partial(_pool_by_layer, pooling=layers.AveragePooling3D),
}

LAYERS: dict[type, Expansion] = {
    layers.AveragePooling3D: partial(_pool_volumes, pooling=layers.AveragePooling2D),
    layers.MaxPooling3D: partial(_pool_volumes, pooling=layers.MaxPooling2D),
    layers.Softmax: merge_softmax_axes,
    layers.Attention: expand_attention,
}


def find_layer_expansion(call: Call) -> Callable[..., Any] | None:
    """Return a function that computes a layer in `EARLY_LAYERS`. Return None if unsupported."""
    layer = call.layer
    expand = EARLY_LAYERS.get(type(layer))
    if expand is None or None in call.inputs[0].shape[1:] or layer.activity_regularizer is not None:
        return None
    is_last = getattr(layer, "data_format", "channels_last") == "channels_last"
    if not is_last or layer.compute_dtype in ("float16", "bfloat16"):
        return None
    if expand is _convolve_steps and len(call.inputs[0].shape) == layer.rank + 2:
        return None  # The layer has an operator.
    return lambda inputs: expand(layer, inputs)


def list_owners(layer: keras.layers.Layer) -> list[Any]:
    """Return `[layer]` if an expansion in `EARLY_LAYERS` may read the layer's weights."""
    return [layer] if type(layer) in EARLY_LAYERS else []


def _expand_conv3d(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    options = layer.strides, layer.padding.upper(), layer.dilation_rate
    return convolve_volumes(x, layer.kernel, *options, lambda y: _complete(layer, y))


def convolve_volumes(
    x: tf.Tensor,
    kernel: tf.Tensor,
    strides: Any,
    padding: str,
    dilations: Any,
    complete: Callable[[Any], Any] = lambda y: y,
) -> tf.Tensor:
    """Convolve volumes in 2D. `complete` is a function that adds a bias and an activation."""
    (_, depth, height, width, channels), (taps, *size, inputs, filters) = x.shape, kernel.shape
    (step, *strides), (gap, *dilations) = strides, dilations
    length = (taps - 1) * gap + 1
    count = -(-(depth if padding == "SAME" else depth - length + 1) // step)
    missing = max((count - 1) * step + length - depth, 0)  # Only for "same".
    x = tf.reshape(x, [-1, depth, height * width, channels])
    if missing:
        x = tf.pad(x, [(0, 0), (missing // 2, missing - missing // 2), (0, 0), (0, 0)])
    groups = tf.split(x, channels // inputs, axis=-1) if channels > inputs else [x]
    x = _concatenate(
        [_slice(part, 1, tap * gap, count, step) for part in groups for tap in range(taps)]
    )
    x = FlattenTime()(tf.reshape(x, [-1, count, height, width, taps * channels]))
    kernel = tf.reshape(tf.transpose(kernel, [1, 2, 0, 3, 4]), [*size, taps * inputs, filters])
    return RestoreTime(count)(
        complete(tf.nn.conv2d(x, kernel, strides, padding, dilations=dilations))
    )


def _convolve_steps(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Expand a Conv1D or Conv2D with an additional axis after the batch, such as time steps."""
    require(layer.padding != "causal" and len(x.shape) == layer.rank + 3)
    convolve = tf.nn.conv1d if layer.rank == 1 else tf.nn.conv2d
    options = list(layer.strides), layer.padding.upper()
    y = convolve(FlattenTime()(x), layer.kernel, *options, dilations=list(layer.dilation_rate))
    return RestoreTime(x.shape[1])(_complete(layer, y))


def _crop_center(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    # Keras enlarges smaller images.
    require(layer.height <= x.shape[-3] and layer.width <= x.shape[-2])
    top, left = (x.shape[-3] - layer.height) // 2, (x.shape[-2] - layer.width) // 2
    return x[..., top : top + layer.height, left : left + layer.width, :]


def _slice(x: tf.Tensor, axis: int, first: int, count: int, step: int) -> tf.Tensor:
    return x[(slice(None),) * axis + (slice(first, first + (count - 1) * step + 1, step),)]


def _concatenate(parts: list[Any]) -> tf.Tensor:
    return tf.concat(parts, -1) if len(parts) > 1 else parts[0]


def _complete(layer: keras.layers.Layer, y: tf.Tensor) -> tf.Tensor:
    y = tf.nn.bias_add(y, layer.bias) if layer.use_bias else y
    return y if layer.activation in (None, keras.activations.linear) else layer.activation(y)


EARLY_LAYERS: dict[type, Callable[[Any, Any], Any]] = {
    layers.CenterCrop: _crop_center,
    **dict.fromkeys((layers.Conv1D, layers.Conv2D), _convolve_steps),
    layers.Conv3D: _expand_conv3d,
}
"""Maps a layer class to a function of the layer and its input. Used while layers are traced."""
