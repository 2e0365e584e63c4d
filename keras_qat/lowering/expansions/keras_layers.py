"""Expands Keras layers that read their weights, and layers that encode categories.

Convolutions of volumes become convolutions of slices. The slices that a kernel covers become
channels of one image. Locally connected layers become a product for each position, or one product.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.helper_layers.operations import FlattenTime, RestoreTime
from keras_qat.keras2.backend import keras, layers
from keras_qat.lowering.expand_call import CannotExpand, require
from keras_qat.lowering.recurrent import MOST_STEPS
from keras_qat.ops.composed import NO_WIDE
from keras_qat.ops.registry import match


def find_layer_expansion(call: Call) -> Callable[..., Any] | None:
    """Return a function of the input that computes a Keras layer from its weights, or None."""
    layer = call.layer
    expand = EARLY_LAYERS.get(type(layer))
    if expand is None or None in call.inputs[0].shape[1:] or layer.activity_regularizer is not None:
        return None
    is_last = getattr(layer, "data_format", "channels_last") == "channels_last"
    if not is_last or layer.compute_dtype in ("float16", "bfloat16"):
        return None
    if type(layer) in HAVE_ROWS and not HAVE_ROWS[type(layer)](layer, call.inputs[0]):
        return None
    return lambda inputs: expand(layer, inputs)


def list_owners(layer: keras.layers.Layer) -> list[Any]:
    """Return a list of the layer if its expansion reads its weights."""
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
    """Convolve volumes with a kernel, and complete the result slice by slice."""
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


def _transpose_with_gaps(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Convolve with the mirror image of the kernel, with a dilation."""
    axes, is_same = len(x.shape) - 2, layer.padding == "same"
    require(set(layer.strides) == {1} and not layer.output_padding)
    lengths = [(k - 1) * d for k, d in zip(layer.kernel_size, layer.dilation_rate, strict=True)]
    around = [(n - n // 2, n // 2) if is_same else (n, n) for n in lengths]
    x = tf.pad(x, [(0, 0), *around, (0, 0)])
    kernel = tf.reverse(layer.kernel, list(range(axes)))
    kernel = tf.transpose(kernel, [*range(axes), axes + 1, axes])
    convolve = tf.nn.conv1d if axes == 1 else tf.nn.conv2d
    y = convolve(x, kernel, 1, "VALID", dilations=list(layer.dilation_rate))
    return _complete(layer, y)


def _convolve_steps(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Convolve the images or sequences of each step."""
    require(layer.padding != "causal" and len(x.shape) == layer.rank + 3)
    convolve = tf.nn.conv1d if layer.rank == 1 else tf.nn.conv2d
    options = list(layer.strides), layer.padding.upper()
    y = convolve(FlattenTime()(x), layer.kernel, *options, dilations=list(layer.dilation_rate))
    return RestoreTime(x.shape[1])(_complete(layer, y))


def _transpose_volumes(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Compute all values between two steps at once, from the inputs that reach them."""
    _, depth, height, width, channels = x.shape
    size, strides, filters = layer.kernel_size, layer.strides, layer.filters
    steps, rows, columns = strides
    require(set(layer.dilation_rate) == {1})
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
    x = _concatenate([_slice(x, 1, tap, count, 1) for tap in range(taps[0])])
    y = tf.nn.conv2d(FlattenTime()(x), kernel, 1, "VALID")
    parts = tf.split(y, steps, axis=-1) if steps > 1 else [y]
    blocks = [RestoreTime(count)(_unpack(part, rows, columns, filters)) for part in parts]
    y = tf.reshape(tf.stack(blocks, axis=2), [-1, count * steps, *blocks[0].shape[2:]])
    wanted = layer.compute_output_shape((None, depth, height, width, channels))[1:4]
    lengths = zip(size, strides, (depth, height, width), wanted, strict=True)
    for axis, (k, s, count, length) in enumerate(lengths, 1):
        cut = max((count - 1) * s + k - length, 0) if layer.padding == "same" else 0
        begin = cut // 2
        if (missing := begin + length - y.shape[axis]) > 0:  # Of output_padding, which is bias.
            y = tf.pad(y, [(0, missing * (axis == other)) for other in range(5)])
        y = y if y.shape[axis] == length else _slice(y, axis, begin, length, 1)
    return _complete(layer, y)


def _unpack(x: tf.Tensor, rows: int, columns: int, filters: int) -> tf.Tensor:
    """Move blocks of values from channels to rows and columns."""
    if rows == columns:
        return tf.nn.depth_to_space(x, rows) if rows > 1 else x
    _, height, width, _ = x.shape
    x = tf.reshape(x, [-1, width, rows, columns * filters])
    x = tf.transpose(x, [0, 2, 1, 3]) if rows > 1 else x
    return tf.reshape(x, [-1, height * rows, width * columns, filters])


def _connect_locally(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    shape = [int(size) for size in layer.compute_output_shape(x.shape)[1:]]
    sizes, kernel = (math.prod(x.shape[1:]), math.prod(shape)), layer.kernel
    if layer.implementation == 2:
        kernel = tf.reshape(kernel * np.asarray(layer.kernel_mask), sizes)
        y = tf.matmul(tf.reshape(x, [-1, sizes[0]]), kernel)
    else:
        if layer.implementation == 3:  # Ordered by outputs; near a border some read less.
            if layer.padding != "valid":
                raise CannotExpand
            kernel = tf.reshape(kernel, [math.prod(shape[:-1]), shape[-1], -1])
            kernel = tf.transpose(kernel, [0, 2, 1])
        y = tf.einsum("bpk,pkf->bpf", _extract_patches(layer, x, shape[:-1]), kernel)
    y = tf.reshape(y, [-1, *shape])
    return _activate(layer, y + layer.bias if layer.use_bias else y)


def _crop_center(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    if layer.height > x.shape[-3] or layer.width > x.shape[-2]:
        raise CannotExpand  # Keras makes such images larger.
    top, left = (x.shape[-3] - layer.height) // 2, (x.shape[-2] - layer.width) // 2
    return x[..., top : top + layer.height, left : left + layer.width, :]


def _extract_patches(layer: keras.layers.Layer, x: tf.Tensor, counts: list[int]) -> tf.Tensor:
    """Return the inputs of the kernel at each position: [batch, positions, values]."""
    parts = [x]
    for axis, (size, step, count) in enumerate(
        zip(layer.kernel_size, layer.strides, counts, strict=True), 1
    ):
        parts = [_slice(part, axis, first, count, step) for part in parts for first in range(size)]
    x = _concatenate(parts)
    return tf.reshape(x, [-1, math.prod(counts), x.shape[-1]])


def _slice(x: tf.Tensor, axis: int, first: int, count: int, step: int) -> tf.Tensor:
    """Return `count` slices along an axis, `step` apart."""
    return x[(slice(None),) * axis + (slice(first, first + (count - 1) * step + 1, step),)]


def _concatenate(parts: list[Any]) -> tf.Tensor:
    return tf.concat(parts, -1) if len(parts) > 1 else parts[0]


def _complete(layer: keras.layers.Layer, y: tf.Tensor) -> tf.Tensor:
    """Add the bias of a layer, and compute its activation."""
    return _activate(layer, tf.nn.bias_add(y, layer.bias) if layer.use_bias else y)


def _activate(layer: keras.layers.Layer, y: tf.Tensor) -> tf.Tensor:
    return y if layer.activation in (None, keras.activations.linear) else layer.activation(y)


def _discretize(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Compute `Discretization`: a value's bin is the number of boundaries that it reaches."""
    boundaries = np.asarray(layer.bin_boundaries, np.float32)
    if layer.sparse or not boundaries.size or NO_WIDE:
        raise CannotExpand
    reached = tf.cast(x[..., None] >= boundaries, tf.float32)
    below, above = reached[..., :-1], reached[..., 1:]
    parts = [1.0 - reached[..., :1], *([below - above] if boundaries.size > 1 else [])]
    one_hot = tf.concat([*parts, reached[..., -1:]], -1)
    if layer.output_mode == "int":
        return tf.argmax(one_hot, -1, layer.compute_dtype)
    return _combine(one_hot, layer.output_mode)


def _encode(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Compute `CategoryEncoding` of indices."""
    if layer.sparse:
        raise CannotExpand
    return _combine(tf.one_hot(x, layer.num_tokens), layer.output_mode)


def _combine(one_hot: tf.Tensor, mode: str) -> tf.Tensor:
    """Return the one-hot vectors of an example, their sum or their maximum."""
    if mode == "one_hot":
        return tf.squeeze(one_hot, -2) if one_hot.shape[-2] == 1 else one_hot
    return {"multi_hot": tf.reduce_max, "count": tf.reduce_sum}[mode](one_hot, -2)


EARLY_LAYERS: dict[type, Callable[[Any, Any], Any]] = {
    layers.CategoryEncoding: _encode,
    layers.CenterCrop: _crop_center,
    **dict.fromkeys((layers.Conv1D, layers.Conv2D), _convolve_steps),
    **dict.fromkeys((layers.Conv1DTranspose, layers.Conv2DTranspose), _transpose_with_gaps),
    layers.Conv3D: _expand_conv3d,
    layers.Conv3DTranspose: _transpose_volumes,
    layers.Discretization: _discretize,
    layers.LocallyConnected1D: _connect_locally,
    layers.LocallyConnected2D: _connect_locally,
}
"""Layer class -> a function of the layer and its input."""

HAVE_ROWS: dict[type, Callable[[Any, Any], bool]] = {
    **dict.fromkeys((layers.Conv1D, layers.Conv2D), lambda layer, x: len(x.shape) > layer.rank + 2),
    **dict.fromkeys(
        (layers.Conv1DTranspose, layers.Conv2DTranspose),
        lambda layer, x: set(layer.dilation_rate) != {1},
    ),
}
"""Layer class with a row for most options -> whether a layer is expanded."""


CONVOLUTIONS = {layers.ConvLSTM1D: layers.Conv1D, layers.ConvLSTM2D: layers.Conv2D}

_made: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""ConvLSTM -> its convolutions of inputs and of states, the same in all of its calls."""


def unroll_conv_lstm(call: Call) -> Callable[..., Any] | None:
    """Return a function that computes a ConvLSTM step by step; None if a row computes it."""
    layer, x = call.layer, call.inputs[0]
    is_plain = len(call.inputs) == 1 and not (layer.stateful or layer.return_state)
    is_plain &= not x.masked and call.kwargs.keys() <= {"mask"} and not call.kwargs.get("mask")
    is_plain &= layer.data_format == "channels_last" and not (
        layer.dropout or layer.recurrent_dropout
    )
    is_known = None not in x.shape[1:] and (x.shape[1] or 0) <= MOST_STEPS
    is_plain &= layer.activity_regularizer is None and layer.compute_dtype == "float32"
    if not is_plain or not is_known or match(call).op is not None:
        return None
    return lambda inputs, **_: _unroll_steps(layer, inputs)


def _unroll_steps(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    of_inputs, of_states = _make_convolutions(layer)
    steps = tf.unstack(RestoreTime(x.shape[1])(of_inputs(FlattenTime()(x))), axis=1)
    gate, activation, outputs = layer.recurrent_activation, layer.activation, []
    hidden = carry = None
    for total in reversed(steps) if layer.go_backwards else steps:
        total = total if hidden is None else total + of_states(hidden)
        takes, keeps, values, gives = tf.split(total, 4, axis=-1)
        added = gate(takes) * activation(values)
        carry = added if carry is None else gate(keeps) * carry + added
        hidden = gate(gives) * activation(carry)
        outputs.append(hidden)
    return tf.stack(outputs, 1) if layer.return_sequences else hidden


def _make_convolutions(layer: keras.layers.Layer) -> tuple[Any, Any]:
    """Return layers with the weights of a ConvLSTM's cell."""
    if layer not in _made:
        convolution, cell = CONVOLUTIONS[type(layer)], layer.cell
        of_inputs = convolution(
            4 * layer.filters,
            layer.kernel_size,
            layer.strides,
            layer.padding,
            dilation_rate=layer.dilation_rate,
            use_bias=layer.use_bias,
            kernel_regularizer=layer.kernel_regularizer,
            kernel_constraint=layer.kernel_constraint,
            bias_regularizer=layer.bias_regularizer,
            bias_constraint=layer.bias_constraint,
            trainable=layer.trainable,
            name="inputs",
        )
        of_states = convolution(
            4 * layer.filters,
            layer.kernel_size,
            padding="same",
            use_bias=False,
            kernel_regularizer=layer.recurrent_regularizer,
            kernel_constraint=layer.recurrent_constraint,
            trainable=layer.trainable,
            name="states",
        )
        of_inputs.kernel, of_states.kernel = cell.kernel, cell.recurrent_kernel
        of_inputs.bias, of_states.bias = cell.bias, None
        of_inputs.built = of_states.built = True
        _made[layer] = of_inputs, of_states
    return _made[layer]
