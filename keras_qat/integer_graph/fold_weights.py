"""The weights of wrappers as integer kernels hold them: BatchNormalization folded, quantized."""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.control_flow import traced_once
from keras_qat.arithmetic.fixed_point import exact_multiplier
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.ops.op import Op
from keras_qat.ops.weights import Weights, reach_of, terms
from keras_qat.training.batch_norm import per_tensor_fold
from keras_qat.training.batch_norm.factor_and_bias import factor_and_bias, scaled

INT8_MAX = 127
"""Largest quantized value of a weight in TFLite, which leaves out -128."""

BIAS_MAX = 2.0**30
"""Largest value of a bias: half of what 32 bits hold, the rest is for the sum it is added to."""

FEW = 512
"""So many products of 8-bit numbers fit the whole numbers of float32."""

LEAST_SCALE = 5e-7 / INT8_MAX
"""Smallest scale of a weight. Finer ones are of channels that training has switched off, and their
products with an input's scale leave the numbers of float32."""

LEAST_MULTIPLIER = 2.0**-23
"""Smallest multiplier of sums in int16 kernels: with it the bias of a switched-off channel fits 32
bits."""

LARGEST_MULTIPLIER = {8: 255.5, 16: 16000.0}
"""Largest multiplier of sums in kernels of so many bits: XNNPACK takes those below 256, int16 ones
those below 2^14. With it any sum but 0 is at an end of the range already (in int16 but 1)."""

Ends = tuple[QuantParams, QuantParams]
"""Quantization parameters of a call's input and output."""


def has_codes(wrapper: Any) -> bool:
    """Whether a wrapper's weights are quantized, or are single factors, which always are exact."""
    return set(wrapper.weight_quantizers) == set(wrapper.weight_axes)


def table_params(wrapper: Any) -> QuantParams:
    """Those of a table with weights of its own between int16 tensors: they are held in int16."""
    _, scale, _ = _folded(wrapper)
    (scale,) = tf.reshape(scale, [-1])
    is_number = tf.executing_eagerly()
    return QuantParams(np.float32(scale.numpy()) if is_number else scale, 0, 16)


def table_of(wrapper: Any, output: QuantParams, quantizer: Any, in_graph: bool) -> Weights:
    """A table in the parameters of what it gives, rounded as its quantizer does in training."""
    table = tf.convert_to_tensor(wrapper.layer.embeddings)
    scale = output.as_tensors().scale
    if quantizer is not None:
        limits = quantizer.observe(None, training=False)
        table = fake_quant.fake_quantize(table, limits[0], limits[1], quantizer.spec.bits)
    q = tf.round(tf.cast(table, tf.float64) / scale)
    scale = tf.reshape(scale, [1, 1])
    if not in_graph:
        q, scale = q.numpy(), scale.numpy()
    return Weights("embeddings", q, scale, bits=output.bits)


def weights_of_calls(wrapper: Any, ends: list[Ends], in_graph: bool) -> list[Weights]:
    """The weights for each call of a wrapper: the same values, with a bias in units of its input.

    Args:
        wrapper: a wrapper that `has_codes`.
        ends: of each of its calls.
        in_graph: whether tensors are wanted, instead of arrays.
    """
    rounding, spec = 0.0, wrapper.weight_spec
    if wrapper.fold == "per_tensor":
        q, scale, bias = _folded_per_tensor(wrapper)
    elif wrapper.fold == "per_channel":
        q, scale, bias = _folded(wrapper)
    else:
        q, scale, bias, rounding = _folded_in_range(wrapper)
    wide = ends[0][0].bits == 16
    inputs, outputs = ([each.as_tensors().scale for each in end] for end in zip(*ends, strict=True))
    # Of the same quantizers: other ranges may be equal by chance, which a graph does not know.
    alike = all(one is first for end in ends for one, first in zip(end, ends[0], strict=True))
    if wide and alike:
        q, scale = _with_exact_multipliers(q, scale, outputs[0] / inputs[0])
    else:
        q, scale = fitting(q, scale, bias, tf.reduce_min(tf.stack(inputs)), wide)
    q = q if in_graph else tf.cast(q, tf.int8).numpy()
    name, axes = next(iter(wrapper.weight_axes.items()), ("", ()))
    found, reach = [], None
    if in_graph and name and not wide and terms(tuple(q.shape), axes) > FEW:
        reach = reach_of(q, axes)
    for each, output in zip(inputs, outputs, strict=True):
        whole = None if bias is None else _whole(bias, scale, each)
        held = tf.minimum(scale, single(LARGEST_MULTIPLIER[16 if wide else 8] * output / each))
        if not in_graph:
            whole, held = None if whole is None else whole.numpy(), held.numpy()
        bits = spec.bits if spec else 8
        found.append(Weights(name, q, held, whole, bits, reach, rounding))
    return found


def parameters_of(layer: Any, op: Op, in_graph: bool) -> Weights:
    """Weights that training leaves as they are, as PReLU's slopes: in 8 bits, half away."""
    (name,) = op.weights
    values = tf.cast(tf.convert_to_tensor(getattr(layer, name)), tf.float64)
    scale = tf.reduce_max(tf.abs(values)) / INT8_MAX
    scale = tf.where(scale > 0, scale, tf.ones_like(scale))
    q = round_half_away(values / scale)
    scale = tf.reshape(single(scale), [1] * len(values.shape))
    return Weights(name, q, scale) if in_graph else Weights(name, q.numpy(), scale.numpy())


def _whole(bias: Any, scale: Any, input_scale: Any) -> Any:
    """A bias in units of input scale x weight scale."""
    products = input_scale * scale
    products = tf.reshape(products, bias.shape if scale.shape.num_elements() > 1 else [])
    return tf.round(bias / products)


def _folded(wrapper: Any) -> tuple[Any, Any, Any]:
    """Quantized values (float32), scales and the real bias (float64) of symmetric weights.

    Q(a W) = a Q(W): the values are those of the kernel as it is, the scales are multiplied by |a|.
    With fewer than 8 bits, scales become a whole number of times finer, so that the bias, which is
    held in units of input scale x weight scale, is rounded less.
    """
    factor, bias = factor_and_bias(wrapper, tf.float64)
    if not wrapper.weight_axes:  # An affine layer: one number for each channel, always exact.
        q = tf.cast(INT8_MAX * tf.sign(factor), tf.float32)
        return q, single(_size(factor) / INT8_MAX), bias
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = tf.convert_to_tensor(getattr(wrapper.layer, name))
    rank = len(kernel.shape)
    channels = [kernel.shape[axis] if axis in axes else 1 for axis in range(-rank, 0)]
    factor = tf.ones([1], tf.float64) if factor is None else factor
    order = [axis for axis in range(rank) if axis - rank not in axes]
    order += [axis % rank for axis in axes]  # Channels last.
    in_order = order == list(range(rank))
    arranged = kernel if in_order else tf.transpose(kernel, order)
    columns = tf.reshape(arranged, [-1, math.prod(channels)])
    quantizer = wrapper.weight_quantizers[name]
    if quantizer.learned is None:
        q, scale = quantized(wrapper.weight_spec.bits)(columns, factor)
    else:
        limits = tf.reshape(quantizer.limits(kernel), [1, -1])
        columns = tf.clip_by_value(columns, -limits, limits)
        q, scale = quantized(wrapper.weight_spec.bits, True)(columns, factor, limits)
    q = tf.reshape(q, arranged.shape)
    if not in_order:
        q = tf.transpose(q, np.argsort(order))
    return q, tf.reshape(scale, channels), bias


def _folded_per_tensor(wrapper: Any) -> tuple[Any, Any, Any]:
    """The same of weights with one scale for all, which are quantized folded."""
    _, bias = factor_and_bias(wrapper, tf.float64)
    q, scale, gains = per_tensor_fold.codes_of(wrapper)
    bits = wrapper.weight_spec.bits if wrapper.weight_axes else 8
    finer = INT8_MAX // (2 ** (bits - 1) - 1)
    scale = single(tf.cast(scale, tf.float64) / finer)
    bias = None if bias is None else per_tensor_fold.gained(wrapper, bias, gains)
    return q * float(finer), tf.reshape(scale, [1] * len(q.shape)), bias


_VECTOR = tf.TensorSpec([None], tf.float64)


@functools.cache
def quantized(bits: int, is_learned: bool = False) -> Any:
    """From a kernel, a column for each channel, and a factor for each to values and scales.

    With learned limits these are given, too.
    """
    given = [tf.TensorSpec([1, None])] if is_learned else []
    levels = 2 ** (bits - 1) - 1
    finer = INT8_MAX // levels

    @partial(traced_once, signature=[tf.TensorSpec([None, None]), _VECTOR, *given])
    def found(kernel: Any, factor: Any, *learned: Any) -> tuple[Any, Any]:
        limits = learned[0] if learned else fake_quant.channel_limits(kernel, (-1,))
        q = fake_quant.quantize_channels(kernel, limits, bits)
        q *= tf.cast(tf.sign(factor), tf.float32) * finer
        return q, single(tf.cast(limits, tf.float64) / (levels * finer) * _size(factor))

    return found


def _size(factor: Any) -> Any:
    """Of a channel that BatchNormalization switches off, 1: its values are zero."""
    return tf.where(factor == 0.0, tf.ones_like(factor), tf.abs(factor))


def fitting(q: Any, scale: Any, bias: Any, input_scale: Any, wide: bool) -> tuple[Any, Any]:
    """Scales with which a bias fits 32 bits.

    Next to nothing is left of a channel's weights where training switched it off, but its bias
    stays. The wider scales round those weights, which is nothing against the bias.
    """
    wider = tf.maximum(scale, LEAST_SCALE)
    if bias is not None and not wide:
        largest = tf.abs(tf.reshape(bias, [-1]))
        if scale.shape.num_elements() == 1:
            largest = tf.reduce_max(largest, keepdims=True)
        wider = tf.maximum(wider, tf.reshape(largest / (input_scale * BIAS_MAX), scale.shape))
    wider = single(wider)
    return _rounded(q, scale / wider), wider


def _rounded(q: Any, factor: Any) -> Any:
    """Quantized values times a factor for each channel, rounded: most often all ones."""
    return tf.cond(
        tf.reduce_all(factor == 1.0),
        lambda: tf.identity(q),
        lambda: tf.round(q * tf.cast(factor, q.dtype)),
    )


def _with_exact_multipliers(q: Any, scale: Any, ratio: Any) -> tuple[Any, Any]:
    """Scales by whose ratio int16 kernels multiply without an error.

    They multiply sums by numbers of 15 bits: up to 0.003 % off, half an LSB at the end of 65 536.
    The scales are made that little larger or smaller with which the multiplier has 15 bits.

    Args:
        q, scale: the weights.
        ratio: scale of the output over that of the input.
    """
    wider = tf.maximum(scale, LEAST_MULTIPLIER * ratio)
    return _rounded(q, scale / wider), single(exact_multiplier(wider / ratio) * ratio)


def _folded_in_range(wrapper: Any) -> tuple[Any, Any, Any, float]:
    """The same in the range that training stored for the folded kernel: `recipes.contrib`.

    TFLite's int8 kernels have no zero point for weights. A channel of an asymmetric 8-bit kernel
    that reaches past 127 gets a wider scale, and its weights are rounded to it; the last number is
    by how much.
    """
    factor, bias = factor_and_bias(wrapper, tf.float64)
    if not wrapper.weight_axes:
        return *_folded(wrapper), 0.0
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = getattr(wrapper.layer, name).numpy()
    if factor is not None:
        kernel = scaled(kernel, axes, tf.cast(factor, tf.float32)).numpy()
    quantizer = wrapper.weight_quantizers[name]
    spec = quantizer.spec
    minimum, maximum = quantizer.current_range(kernel)
    values = fake_quant.fake_quantize(kernel, minimum, maximum, spec.bits, spec.narrow_range)
    levels = 2**spec.bits - (2 if spec.narrow_range else 1)
    scale = (
        float(maximum) - float(minimum)
    ) / levels or LEAST_SCALE  # Of zeros alone: fine for biases.
    q = np.round(values.numpy() / scale)
    reduced = tuple(axis for axis in range(-q.ndim, 0) if axis not in axes)
    highest = np.max(np.abs(q), axis=reduced, keepdims=True)
    widening = np.maximum(highest / INT8_MAX, 1.0)
    rounded = np.round(q / widening)
    lost = float(np.max(np.abs(rounded * widening - q), initial=0.0))
    finer = np.where(widening > 1, 1.0, np.maximum(INT8_MAX // np.maximum(highest, 1.0), 1.0))
    found = rounded * finer, scale * widening / finer
    q, scales = (
        tf.constant(each, dtype)
        for each, dtype in zip(found, (tf.float32, tf.float64), strict=True)
    )
    return q, single(scales), bias, lost
