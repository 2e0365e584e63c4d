"""How a layer's computation is spelled in an exported function.

For servers the layer computes itself, with folded weights. TFLite's converter quantizes some
spellings of an operation and not others; which ones was found by trying and is written down here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.export.folded import Folded
from keras_qat.export.placeholders import PLACEHOLDER
from keras_qat.export.recurrent import rnn
from keras_qat.keras2.backend import keras, recurrence, swapped
from keras_qat.operations import number

__all__ = ["as_keras", "as_tflite", "beside_special_numbers", "in_float"]

Activation = Callable[[Any], Any]

_layers = keras.layers
_BatchNorm = _layers.BatchNormalization


def as_keras(layer: Any, x: Any, folded: Folded, activation: Activation = tf.identity) -> Any:
    """The layer's own `call`, with the folded kernel and bias, then the activation."""
    return activation(_call(layer, x, folded))


def _call(layer: Any, x: Any, folded: Folded) -> Any:
    if not folded.name:
        return layer(x, training=False) if isinstance(layer, _BatchNorm) else layer(x)
    weights = {folded.name: tf.convert_to_tensor(folded.kernel)}
    if folded.bias is not None:
        weights["bias"] = tf.constant(folded.bias)
        if hasattr(layer, "use_bias"):
            weights["use_bias"] = True
    with swapped(layer, **weights):
        return layer.call(x)


def as_tflite(layer: Any, x: Any, folded: Folded, activation: Activation = tf.identity) -> Any:
    """The form that the TFLite converter turns into one int8 operation."""
    if folded.limits is None:  # A kernel in float.
        return as_keras(layer, x, folded, activation)
    if not folded.name:
        return activation(_affine(layer, x, folded))
    if type(layer) is _layers.Conv1DTranspose:
        return _conv1d_transpose(layer, x, folded, activation)
    return activation(SPELLINGS.get(type(layer), _as_is)(layer, x, folded))


def in_float(layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A layer that is not quantized, in operations that the converter takes."""
    with recurrence(rnn, layer):
        return FLOAT_SPELLINGS.get(type(layer), _own_call)(layer, *args, **kwargs)


def beside_special_numbers(arguments: Any) -> Any:
    """The arguments of a maximum or minimum, with numbers that are next to 0, 1 and -1.

    Of clips at these the converter makes RELU, RELU_0_TO_1 and RELU_N1_TO_1, which it leaves in
    float. In codes the numbers are the same.
    """

    def beside(leaf: Any) -> Any:
        found = number(leaf)
        if found in (0, 1, -1):
            return found * (1 + 2.0**-23) or 1e-30
        return leaf

    return tf.nest.map_structure(beside, arguments)


def _own_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)


def _category_encoding(layer: Any, x: Any, count_weights: Any = None) -> Any:
    # Keras counts with DenseBincount, which TFLite lacks.
    codes = tf.one_hot(tf.cast(x, tf.int32), layer.num_tokens, 1.0, 0.0)
    if layer.output_mode == "one_hot":
        return tf.squeeze(codes, -2) if x.shape[-1] == 1 else codes
    if layer.output_mode == "multi_hot":
        return tf.reduce_max(codes, -2)
    codes = (
        codes if count_weights is None else codes * tf.cast(count_weights, tf.float32)[..., None]
    )
    return tf.reduce_sum(codes, -2)


def _group_normalization(layer: Any, x: Any) -> Any:
    # Keras asks for the shape of its input at run time, of which TFLite makes a wrong broadcast.
    axis = layer.axis % x.shape.rank
    sizes = _sizes(x)
    split = [*sizes[:axis], layer.groups, sizes[axis] // layer.groups, *sizes[axis + 1 :]]
    grouped = tf.reshape(x, split)
    axes = [each for each in range(1, len(split)) if each != axis]
    mean = tf.reduce_mean(grouped, axes, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(grouped, mean), axes, keepdims=True)
    y = tf.reshape((grouped - mean) * tf.math.rsqrt(variance + layer.epsilon), sizes)
    shape = [1] * axis + [-1] + [1] * (len(sizes) - axis - 1)
    y = y * tf.reshape(layer.gamma, shape) if layer.scale else y
    return y + tf.reshape(layer.beta, shape) if layer.center else y


def _layer_normalization(layer: Any, x: Any) -> Any:
    # Keras spells it as a batch normalization of one image, in three times as many operations.
    axes = [axis % x.shape.rank for axis in tf.nest.flatten(layer.axis)]
    mean = tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(x, mean), axes, keepdims=True)
    y = (x - mean) * tf.math.rsqrt(variance + layer.epsilon)
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(x.shape.rank)]
    y = y * tf.reshape(layer.gamma, shape) if layer.scale else y
    return y + tf.reshape(layer.beta, shape) if layer.center else y


def _random_crop(layer: Any, x: Any, training: Any = None) -> Any:
    # What Keras computes at inference, without its choice between that and a random crop.
    return keras.preprocessing.image.smart_resize(x, (layer.height, layer.width))


def _dot(layer: Any, inputs: Any) -> Any:
    # The range that the converter gives to L2_NORMALIZATION would spread to what moves its values.
    if layer.normalize:
        axes = layer.axes if isinstance(layer.axes, (list, tuple)) else (layer.axes, layer.axes)
        squares = [tf.reduce_sum(x * x, axis, True) for x, axis in zip(inputs, axes, strict=True)]
        pairs = zip(inputs, squares, strict=True)
        inputs = [x * tf.math.rsqrt(tf.maximum(square, 1e-12)) for x, square in pairs]
    with swapped(layer, normalize=False):
        return layer(inputs)


def _activation(layer: Any, x: Any) -> Any:
    # Before TensorFlow 2.16 the converter has no Softsign.
    if layer.activation is keras.activations.softsign:
        return x / (1.0 + tf.abs(x))
    return layer(x)


def _resizing(layer: Any, x: Any) -> Any:
    if layer.interpolation not in ("nearest", "bilinear"):
        raise ValueError(
            f"{layer.name}: TFLite cannot resize with interpolation={layer.interpolation!r}. Use "
            f"'bilinear' or 'nearest', or resize the images before they go into the model."
        )
    return layer(x)


def _not_in_tflite(layer: Any, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"{layer.name}: TFLite has no operation for {type(layer).__name__}. Compute it before the "
        f"model, in the input pipeline, and quantize the model behind it."
    )


FLOAT_SPELLINGS: dict[type, Callable[..., Any]] = {
    _layers.Activation: _activation,
    _layers.Resizing: _resizing,
    **dict.fromkeys(
        (
            _layers.Hashing,
            _layers.HashedCrossing,
            _layers.IntegerLookup,
            _layers.StringLookup,
            _layers.TextVectorization,
        ),
        _not_in_tflite,
    ),
    _layers.Dot: _dot,
    _layers.CategoryEncoding: _category_encoding,
    _layers.GroupNormalization: _group_normalization,
    _layers.LayerNormalization: _layer_normalization,
    _layers.RandomCrop: _random_crop,
}
"""Layer class -> its computation in float where TFLite has no kernel for Keras' own."""


def _conv2d(layer: Any, x: Any, folded: Folded) -> Any:
    # Keras spells dilation as SpaceToBatch, conv, BatchToSpace, which stays in float.
    y = tf.nn.conv2d(
        x,
        _per_channel(folded),
        strides=layer.strides,
        padding=layer.padding.upper(),
        dilations=layer.dilation_rate,
    )
    return _add_bias(y, folded)


def _depthwise_conv2d(layer: Any, x: Any, folded: Folded) -> Any:
    # The converter knows per-channel ranges on the last axis only: quantize [h, w, 1, c * m].
    height, width, channels, multiplier = folded.kernel.shape
    kernel = _per_channel(folded, (height, width, 1, channels * multiplier))
    # The raw operation, as tf.nn.depthwise_conv2d spells dilation like Keras does.
    y = tf.raw_ops.DepthwiseConv2dNative(
        input=x,
        filter=tf.reshape(kernel, folded.kernel.shape),
        strides=[1, *layer.strides, 1],
        padding=layer.padding.upper(),
        dilations=[1, *layer.dilation_rate, 1],
    )
    return _add_bias(y, folded)


def _conv1d(layer: Any, x: Any, folded: Folded) -> Any:
    # As Conv2D on [batch, 1, steps, channels].
    if layer.padding == "causal":
        x = tf.pad(x, [[0, 0], [(layer.kernel_size[0] - 1) * layer.dilation_rate[0], 0], [0, 0]])
    padding = {"causal": "VALID"}.get(layer.padding, layer.padding.upper())
    y = tf.nn.conv2d(
        tf.expand_dims(x, 1),
        _per_channel(folded, (1, *folded.kernel.shape)),
        strides=(1, *layer.strides),
        padding=padding,
        dilations=(1, *layer.dilation_rate),
    )
    return tf.squeeze(_add_bias(y, folded), 1)


def _depthwise_conv1d(layer: Any, x: Any, folded: Folded) -> Any:
    # The kernel's strides have to be equal; along the axis of size 1 they change nothing.
    steps, channels, multiplier = folded.kernel.shape
    kernel = _per_channel(folded, (1, steps, 1, channels * multiplier))
    y = tf.raw_ops.DepthwiseConv2dNative(
        input=tf.expand_dims(x, 1),
        filter=tf.reshape(kernel, (1, steps, channels, multiplier)),
        strides=[1, *layer.strides * 2, 1],
        padding=layer.padding.upper(),
        dilations=[1, 1, *layer.dilation_rate, 1],
    )
    return tf.squeeze(_add_bias(y, folded), 1)


def _conv2d_transpose(layer: Any, x: Any, folded: Folded) -> Any:
    return _transpose(layer, x, folded, folded.kernel.shape, layer.strides)


def _conv1d_transpose(layer: Any, x: Any, folded: Folded, activation: Activation) -> Any:
    # As Conv2DTranspose on [batch, 1, steps, channels]. The converter does not merge an
    # activation behind the squeeze.
    shape = (1, *folded.kernel.shape)
    y = _transpose(layer, tf.expand_dims(x, 1), folded, shape, (1, *layer.strides))
    return tf.squeeze(activation(y), 1)


def _transpose(layer: Any, x: Any, folded: Folded, shape: Any, strides: Any) -> Any:
    padding = layer.output_padding
    padding = (0, *padding) if padding is not None and len(padding) == 1 else padding
    sizes = [tf.shape(x)[0]]
    for axis in (0, 1):
        size = x.shape[axis + 1] or tf.shape(x)[axis + 1]
        kernel, stride = shape[axis], strides[axis]
        if padding is None or kernel == stride == 1:
            extra = max(kernel - stride, 0) if layer.padding == "valid" else 0
            sizes.append(size * stride + extra)
        else:
            extra = kernel if layer.padding == "valid" else kernel - 2 * (kernel // 2)
            sizes.append((size - 1) * stride + extra + padding[axis])
    y = tf.nn.conv2d_transpose(
        x,
        _per_tensor(folded, shape),
        tf.stack([*sizes, shape[2]]),
        strides=strides,
        padding=layer.padding.upper(),
    )
    bias = np.zeros(shape[2], np.float32) if folded.bias is None else folded.bias
    return tf.nn.bias_add(y, bias + _NO_BIAS)


def _as_is(layer: Any, x: Any, folded: Folded) -> Any:
    """The layer's own `call`, with its kernel quantized where the converter can read it."""
    limits = folded.limits
    assert limits is not None
    if limits.size == 1:
        kernel = _per_tensor(folded, folded.kernel.shape)
    elif limits.shape[-1] == limits.size and limits.ndim in (1, 2, 4):
        kernel = _per_channel(folded)
    else:
        kernel = folded.kernel
    return _call(layer, x, dataclasses.replace(folded, kernel=kernel))


def _affine(layer: Any, x: Any, folded: Folded) -> Any:
    channels = folded.kernel.shape[2]
    kernel = _per_channel(folded, (1, 1, 1, channels))
    image = x if x.shape.rank == 4 else tf.reshape(x, [-1, 1, 1, channels])
    y = tf.nn.depthwise_conv2d(
        image, tf.reshape(kernel, [1, 1, channels, 1]), strides=[1, 1, 1, 1], padding="VALID"
    )
    y = _add_bias(y, folded)
    return y if x.shape.rank == 4 else tf.reshape(y, _sizes(x))


def _dense(layer: Any, x: Any, folded: Folded) -> Any:
    # A MatMul with per-channel weights does not convert; the same as a 1x1 convolution does.
    channels, units = folded.kernel.shape
    kernel = _per_channel(folded, (1, 1, channels, units))
    y = tf.nn.conv2d(tf.reshape(x, [-1, 1, 1, channels]), kernel, strides=1, padding="VALID")
    return tf.reshape(_add_bias(y, folded), [*_sizes(x)[:-1], units])


def _einsum_dense(layer: Any, x: Any, folded: Folded) -> Any:
    """A matrix product, if it is one: older converters leave others in float."""
    inputs, weights, output = re.split(",|->", layer.equation)
    summed = [axis for axis in weights if axis not in output]
    lead, kept = inputs[: len(inputs) - len(summed)], weights[len(summed) :]
    is_product = (inputs, weights, output) == (
        "".join([lead, *summed]),
        "".join([*summed, kept]),
        lead + kept,
    )
    sizes = folded.kernel.shape[len(summed) :]
    bias = _NO_BIAS if folded.bias is None else folded.bias
    if not is_product or bias.ndim > len(sizes):
        return _as_is(layer, x, folded)
    bias = np.broadcast_to(bias, sizes).reshape(-1)
    kernel = _per_tensor(folded, (-1, bias.size))
    y = tf.matmul(tf.reshape(x, [-1, kernel.shape[0]]), kernel)
    return tf.reshape(tf.nn.bias_add(y, bias), [*_sizes(x)[: len(lead)], *sizes])


_NO_BIAS = np.float32(1e-30)
"""Becomes the code 0. Without a bias the converter merges no activation into some operations, or
leaves them in float, and it drops one of zeros."""


def _sizes(x: Any) -> list[Any]:
    """The sizes of a tensor's axes: -1 for the batch, if it alone is unknown."""
    sizes = x.shape.as_list()
    if None in sizes[1:]:
        return [tf.shape(x)[axis] if size is None else size for axis, size in enumerate(sizes)]
    return [-1, *sizes[1:]]


def _add_bias(y: Any, folded: Folded) -> Any:
    return y if folded.bias is None else tf.nn.bias_add(y, folded.bias)


def _per_tensor(folded: Folded, shape: tuple[int, ...]) -> Any:
    limit = float(folded.limits.item())  # type: ignore[union-attr]
    return tf.quantization.fake_quant_with_min_max_args(
        _given(folded, shape), -limit, limit, num_bits=8, narrow_range=True
    )


def _per_channel(folded: Folded, shape: tuple[int, ...] | None = None) -> Any:
    shape = folded.kernel.shape if shape is None else shape
    limits = folded.limits.reshape([-1])  # type: ignore[union-attr]
    return tf.quantization.fake_quant_with_min_max_vars_per_channel(
        _given(folded, shape), -limits, limits, num_bits=8, narrow_range=True
    )


def _given(folded: Folded, shape: tuple[int, ...]) -> Any:
    """The kernel that the converter is given."""
    if folded.placeholder:
        return tf.constant(PLACEHOLDER, tf.float32, shape)
    return folded.kernel.reshape(shape)


SPELLINGS = {
    _layers.Conv2DTranspose: _conv2d_transpose,
    _layers.Conv1D: _conv1d,
    _layers.DepthwiseConv1D: _depthwise_conv1d,
    _layers.Conv2D: _conv2d,
    _layers.DepthwiseConv2D: _depthwise_conv2d,
    _layers.Dense: _dense,
    _layers.EinsumDense: _einsum_dense,
}
