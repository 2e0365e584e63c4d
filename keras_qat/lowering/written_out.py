"""Keras' layers that TFLite has no integer kernel of, written out in operations that have one.

Convolutions of volumes become convolutions of slices, with the slices that a kernel covers side by
side as channels. Locally connected layers become a product for each position, or one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call
from keras_qat.frontend.helper_layers import FlattenTime, RestoreTime
from keras_qat.frontend.keras2.backend import keras, layers
from keras_qat.lowering.categories import binned, encoded


def require(condition: Any) -> None:
    """Leaves the operation as it is, unless its options are among those that are written out."""
    if not condition:
        raise NotImplementedError


def by_matrix(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a linear operation along the last axis as a product with its matrix."""

    def multiply(x: Any, *args: Any, **kwargs: Any) -> Any:
        require(x.shape[-1] is not None)
        with tf.init_scope():
            matrix = np.asarray(operation(tf.eye(x.shape[-1])[None], *args, **kwargs))[0]
        return tf.matmul(x, matrix)

    return multiply


def written_out(call: Call) -> Callable[..., Any] | None:
    """Returns a function that computes what a layer of Keras computes, or None.

    It takes the input of the layer, and reads its weights.
    """
    layer = call.layer
    write = WRITTEN_OUT.get(type(layer))
    if write is None or None in call.inputs[0].shape[1:] or layer.activity_regularizer is not None:
        return None
    is_last = getattr(layer, "data_format", "channels_last") == "channels_last"
    is_plain = is_last and getattr(layer, "groups", 1) == 1
    if not is_plain or layer.compute_dtype in ("float16", "bfloat16"):
        return None
    return lambda inputs: write(layer, inputs)


def own_weights(layer: Any) -> list[Any]:
    """Returns the layers whose weights the function that stands for a layer reads: itself."""
    return [layer] if type(layer) in WRITTEN_OUT else []


def _convolution_of_volumes(layer: Any, x: Any) -> Any:
    _, depth, height, width, channels = x.shape
    taps, *size = layer.kernel_size
    (step, *strides), (gap, *dilations) = layer.strides, layer.dilation_rate
    count = layer.compute_output_shape(x.shape)[1]
    missing = max((count - 1) * step + (taps - 1) * gap + 1 - depth, 0)  # 0 but for "same".
    x = tf.reshape(x, [-1, depth, height * width, channels])
    if missing:
        x = tf.pad(x, [(0, 0), (missing // 2, missing - missing // 2), (0, 0), (0, 0)])
    x = _side_by_side([_taken(x, 1, tap * gap, count, step) for tap in range(taps)])
    x = FlattenTime()(tf.reshape(x, [-1, count, height, width, taps * channels]))
    kernel = tf.transpose(layer.kernel, [1, 2, 0, 3, 4])
    kernel = tf.reshape(kernel, [*size, taps * channels, layer.filters])
    y = tf.nn.conv2d(x, kernel, strides, layer.padding.upper(), dilations=dilations)
    y = tf.nn.bias_add(y, layer.bias) if layer.use_bias else y
    return RestoreTime(count)(_activated(layer, y))


def _transposed_of_volumes(layer: Any, x: Any) -> Any:
    """Computes the block of values between two steps at once, from the inputs that reach it."""
    _, depth, height, width, channels = x.shape
    size, strides, filters = layer.kernel_size, layer.strides, layer.filters
    steps, block, other = strides
    require(block == other and not layer.output_padding and set(layer.dilation_rate) == {1})
    taps = [-(-k // s) for k, s in zip(size, strides, strict=True)]
    more = [(0, n * s - k) for k, s, n in zip(size, strides, taps, strict=True)]
    kernel = tf.pad(layer.kernel, [*more, (0, 0), (0, 0)])
    pairs = [n for pair in zip(taps, strides, strict=True) for n in pair]
    kernel = tf.reverse(tf.reshape(kernel, [*pairs, filters, channels]), [0, 2, 4])
    kernel = tf.transpose(kernel, [2, 4, 0, 7, 1, 3, 5, 6])
    kernel = tf.reshape(kernel, [*taps[1:], taps[0] * channels, math.prod(strides) * filters])
    around = [(0, 0), *((n - 1, n - 1) for n in taps), (0, 0)]
    x = tf.pad(x, around) if max(taps) > 1 else x
    count = depth + taps[0] - 1
    x = _side_by_side([_taken(x, 1, tap, count, 1) for tap in range(taps[0])])
    y = tf.nn.conv2d(FlattenTime()(x), kernel, 1, "VALID")
    parts = tf.split(y, steps, axis=-1) if steps > 1 else [y]
    parts = [tf.nn.depth_to_space(part, block) for part in parts] if block > 1 else parts
    blocks = [RestoreTime(count)(part) for part in parts]
    y = tf.reshape(tf.stack(blocks, axis=2), [-1, count * steps, *blocks[0].shape[2:]])
    wanted = layer.compute_output_shape((None, depth, height, width, channels))[1:4]
    for axis, (k, s, length) in enumerate(zip(size, strides, wanted, strict=True), 1):
        begin = max(k - s, 0) // 2 if layer.padding == "same" else 0
        y = y if y.shape[axis] == length else _taken(y, axis, begin, length, 1)
    return _activated(layer, tf.nn.bias_add(y, layer.bias) if layer.use_bias else y)


def _locally_connected(layer: Any, x: Any) -> Any:
    shape = [int(size) for size in layer.compute_output_shape(x.shape)[1:]]
    sizes, kernel = (math.prod(x.shape[1:]), math.prod(shape)), layer.kernel
    if layer.implementation == 2:
        kernel = tf.reshape(kernel * np.asarray(layer.kernel_mask), sizes)
        y = tf.matmul(tf.reshape(x, [-1, sizes[0]]), kernel)
    else:
        if layer.implementation == 3:  # Ordered by outputs; near a border some read less.
            if layer.padding != "valid":
                raise NotImplementedError
            kernel = tf.reshape(kernel, [math.prod(shape[:-1]), shape[-1], -1])
            kernel = tf.transpose(kernel, [0, 2, 1])
        y = tf.einsum("bpk,pkf->bpf", _patches(layer, x, shape[:-1]), kernel)
    y = tf.reshape(y, [-1, *shape])
    return _activated(layer, y + layer.bias if layer.use_bias else y)


def _center(layer: Any, x: Any) -> Any:
    if layer.height > x.shape[-3] or layer.width > x.shape[-2]:
        raise NotImplementedError  # Keras makes such images larger.
    top, left = (x.shape[-3] - layer.height) // 2, (x.shape[-2] - layer.width) // 2
    return x[..., top : top + layer.height, left : left + layer.width, :]


def _patches(layer: Any, x: Any, counts: list[int]) -> Any:
    """Returns what the kernel of each position multiplies: [batch, positions, values]."""
    parts = [x]
    for axis, (size, step, count) in enumerate(
        zip(layer.kernel_size, layer.strides, counts, strict=True), 1
    ):
        parts = [_taken(part, axis, first, count, step) for part in parts for first in range(size)]
    x = _side_by_side(parts)
    return tf.reshape(x, [-1, math.prod(counts), x.shape[-1]])


def _taken(x: Any, axis: int, first: int, count: int, step: int) -> Any:
    """Returns so many slices along an axis, `step` apart."""
    return x[(slice(None),) * axis + (slice(first, first + (count - 1) * step + 1, step),)]


def _side_by_side(parts: list[Any]) -> Any:
    return tf.concat(parts, -1) if len(parts) > 1 else parts[0]


def _activated(layer: Any, y: Any) -> Any:
    return y if layer.activation in (None, keras.activations.linear) else layer.activation(y)


WRITTEN_OUT: dict[type, Callable[[Any, Any], Any]] = {
    layers.CategoryEncoding: encoded,
    layers.CenterCrop: _center,
    layers.Conv3D: _convolution_of_volumes,
    layers.Conv3DTranspose: _transposed_of_volumes,
    layers.Discretization: binned,
    layers.LocallyConnected1D: _locally_connected,
    layers.LocallyConnected2D: _locally_connected,
}
"""Layer class -> a function of the layer and its input."""
