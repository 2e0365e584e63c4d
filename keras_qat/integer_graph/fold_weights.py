"""Folds BatchNormalization into weights, and quantizes the weights for files.

Integer kernels sum products of inputs and weights, add a bias, and multiply the sum. The multiplier
is input scale * weight scale / output scale. The unit of a bias is input scale * weight scale. If
all weights of a channel are near zero, this unit is so small that the bias may exceed 32 bits. Such
unused channels get larger scales.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.control_flow import trace_once
from keras_qat.arithmetic.fixed_point import exact_multiplier
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.keras2.backend import keras
from keras_qat.ops.op import Op
from keras_qat.ops.weights import Weights, compute_reach, count_terms, map_rows
from keras_qat.training.batch_norm import fold_modes
from keras_qat.training.batch_norm.factor_and_bias import compute_factor_and_bias, scale_channels
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.layers import QuantizeWrapper

INT8_MAX = 127
"""Largest quantized value of a weight in TFLite. -128 is not used."""

BIAS_MAX = 2.0**30
"""Largest quantized bias. It is half of the int32 maximum, because kernels add products to it."""

INT4_MAX = 7
"""Largest quantized value of a 4-bit weight. -8 is not used."""

FEW = 512
"""A float32 sum of at most this number of products of two 8-bit values is exact."""

LEAST_SCALE = 5e-7 / INT8_MAX
"""Smallest scale of a weight. The product of a smaller scale and an input scale could underflow in
float32. Only unused channels would have smaller scales."""

LEAST_MULTIPLIER = 2.0**-23
"""Smallest multiplier in int16 TFLite kernels. With smaller ones, the quantized bias of an unused
channel may exceed 32 bits."""

FEW_FOR_INT32 = (2**31 - 1) // (INT8_MAX * 255)
"""An int32 sum of at most this number of products of two 8-bit values cannot overflow."""

LARGEST_MULTIPLIER = {8: 255.5, 16: 16000.0}
"""Maps activation bits to the largest allowed multiplier. XNNPACK supports multipliers below 256.
TFLite's int16 kernels support up to 2^14. Larger multipliers would saturate nearly all outputs."""

Ends = tuple[QuantParams, QuantParams]
"""Quantization parameters of a call's input and output."""


def has_quantized_weights(wrapper: QuantizeWrapper) -> bool:
    """Returns whether every kernel or embedding table of a wrapper has a quantizer."""
    return set(wrapper.weight_quantizers) == set(wrapper.weight_axes)


def find_table_params(wrapper: QuantizeWrapper) -> QuantParams:
    """Returns int16 parameters for the output of an Embedding without an output quantizer.

    The output has the scale of the embedding table.
    """
    _, scale, _ = _fold(wrapper)
    (scale,) = tf.reshape(scale, [-1])
    is_known = tf.executing_eagerly()
    return QuantParams(np.float32(scale.numpy()) if is_known else scale, 0, 16)


def quantize_table(
    wrapper: QuantizeWrapper,
    output: QuantParams,
    quantizer: ActivationQuantizer | None,
    in_graph: bool,
) -> Weights:
    """Quantizes an embedding table with the parameters of the layer's output.

    As in training, the output's `quantizer` fake-quantizes the rows of the table first.
    """
    scale = output.as_tensors().scale
    limits = None if quantizer is None else quantizer.observe(None, training=False)

    def quantize(rows: ArrayLike) -> tf.Tensor:
        rows = tf.convert_to_tensor(rows)
        if limits is not None and quantizer is not None:
            rows = fake_quant.fake_quantize(rows, limits[0], limits[1], quantizer.spec.bits)
        q = tf.round(tf.cast(rows, tf.float64) / scale)
        return tf.cast(q, tf.int32 if quantizer is None else tf.int16)

    q = map_rows(quantize, tf.convert_to_tensor(wrapper.layer.embeddings))
    scale = tf.reshape(scale, [1, 1])
    if not in_graph:
        scale = scale.numpy()
    elif isinstance(q, np.ndarray):
        q = tf.constant(q)
    return Weights("embeddings", q, scale, bits=output.bits)


def fold_calls(wrapper: QuantizeWrapper, ends: list[Ends], in_graph: bool) -> list[Weights]:
    """Folds and quantizes a wrapper's weights. Returns one `Weights` for each call of the wrapper.

    All calls of a shared layer use the same quantized weights. Biases and scales may differ,
    because they depend on the scales of each call's input and output. With `in_graph`, the results
    are tensors instead of arrays.
    """
    rounding, spec = 0.0, wrapper.weight_spec
    reach, bits = None, spec.bits if spec else 8
    divisor: Any = find_divisor(bits) if bits <= 4 else None
    if wrapper.fold == "per_tensor":
        q, scale, bias = _fold_per_tensor(wrapper)
    elif wrapper.fold == "per_channel":
        q, scale, bias = _fold(wrapper)
    else:
        q, scale, bias, rounding, divisor = _fold_in_range(wrapper)
    wide = ends[0][0].bits == 16
    name, axes = next(iter(wrapper.weight_axes.items()), ("", ()))
    inputs, outputs = (
        [params.as_tensors().scale for params in end] for end in zip(*ends, strict=True)
    )
    # Compares ranges by identity, because the values of a graph's tensors are unknown.
    alike = all(one is first for end in ends for one, first in zip(end, ends[0], strict=True))
    if wide and alike:
        q, scale = _make_multipliers_exact(q, scale, outputs[0] / inputs[0])
    else:
        if name and not wide and count_terms(tuple(q.shape), axes) > FEW_FOR_INT32:
            scale_of_sums = tf.reduce_max(tf.stack(list(map(_find_least_scale, ends))))
            q, scale = _widen(q, scale, tf.maximum(scale, scale_of_sums), divisor)
        q, scale = fit_bias(q, scale, bias, tf.reduce_min(tf.stack(inputs)), wide, divisor)
    if in_graph and name and not wide and count_terms(tuple(q.shape), axes) > FEW:
        reach = compute_reach(q, axes)
    weights = Weights(name, q, scale, bits=bits, reach=reach, rounding=rounding, divisor=divisor)
    return copy_for_calls(weights, bias, inputs, outputs, in_graph, wide)


def copy_for_calls(
    weights: Weights,
    bias: tf.Tensor | None,
    inputs: list[tf.Tensor],
    outputs: list[tf.Tensor] | None,
    in_graph: bool,
    wide: bool = False,
) -> list[Weights]:
    """Returns a copy of `weights` for each call. The copies contain the quantized bias.

    `inputs` and `outputs` contain the scales of each call's input and output. Weight scales are
    reduced if the multiplier exceeds `LARGEST_MULTIPLIER`. They stay the same without `outputs`.
    """
    q = weights.q if in_graph else tf.cast(weights.q, tf.int8).numpy()
    largest, calls = LARGEST_MULTIPLIER[16 if wide else 8], []
    for index, input_scale in enumerate(inputs):
        bias_q = None if bias is None else _quantize_bias(bias, weights.scale, input_scale)
        scale = weights.scale
        if outputs is not None:
            scale = tf.minimum(scale, single(largest * outputs[index] / input_scale))
        if not in_graph:
            bias_q, scale = None if bias_q is None else bias_q.numpy(), scale.numpy()
        calls.append(dataclasses.replace(weights, q=q, scale=scale, bias=bias_q))
    return calls


def quantize_parameters(layer: keras.layers.Layer, op: Op, in_graph: bool) -> Weights:
    """Quantizes the weight of a layer without a wrapper, such as PReLU, to 8 bits."""
    (name,) = op.weights
    values = tf.cast(tf.convert_to_tensor(getattr(layer, name)), tf.float64)
    scale = tf.reduce_max(tf.abs(values)) / INT8_MAX
    scale = tf.where(scale > 0, scale, tf.ones_like(scale))
    q = round_half_away(values / scale)
    scale = tf.reshape(single(scale), [1] * len(values.shape))
    return Weights(name, q, scale) if in_graph else Weights(name, q.numpy(), scale.numpy())


def _quantize_bias(bias: tf.Tensor, scale: tf.Tensor, input_scale: tf.Tensor) -> tf.Tensor:
    """Return the quantized bias. Its unit is input scale * weight scale."""
    products = input_scale * scale
    products = tf.reshape(products, bias.shape if scale.shape.num_elements() > 1 else [])
    return tf.round(bias / products)


def _fold(wrapper: QuantizeWrapper) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
    """Fold and quantize symmetric weights. Return quantized weights, scales and the float bias.

    BatchNormalization multiplies each channel by a factor `a`. Since `Q(a * W) = a * Q(W)` for a
    quantizer Q, `W` is quantized first, and its scale is multiplied by `abs(a)`. Weights with fewer
    than 8 bits are multiplied by `find_divisor(bits)`, and scales are divided by it.
    """
    factor, bias = compute_factor_and_bias(wrapper, tf.float64)
    if not wrapper.weight_axes:  # An affine layer has one exact value per channel.
        q = tf.cast(INT8_MAX * tf.sign(factor), tf.float32)
        return q, single(_get_magnitude(factor) / INT8_MAX), bias
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
        q, scale = make_quantize(wrapper.weight_spec.bits)(columns, factor)
    else:
        limits = tf.reshape(quantizer.limits(kernel), [1, -1])
        columns = tf.clip_by_value(columns, -limits, limits)
        q, scale = make_quantize(wrapper.weight_spec.bits, True)(columns, factor, limits)
    q = tf.reshape(q, arranged.shape)
    if not in_order:
        q = tf.transpose(q, np.argsort(order))
    return q, tf.reshape(scale, channels), bias


def _fold_per_tensor(wrapper: QuantizeWrapper) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
    """Fold and quantize a kernel with one scale for all channels. Return the same as `_fold`."""
    _, bias = compute_factor_and_bias(wrapper, tf.float64)
    q, scale, gains = fold_modes.quantize_folded(wrapper)
    divisor = find_divisor(wrapper.weight_spec.bits) if wrapper.weight_axes else 1
    scale = single(tf.cast(scale, tf.float64) / divisor)
    bias = None if bias is None else fold_modes.apply_gains(wrapper, bias, gains)
    return q * float(divisor), tf.reshape(scale, [1] * len(q.shape)), bias


def find_divisor(bits: int) -> int:
    """Returns the factor by which files multiply weights of few bits, such as 18 for 4 bits.

    The largest 4-bit value becomes 7 * 18 = 126, which fits in int8. Scales are divided by the
    factor. This makes the unit of the bias smaller, so the bias becomes more accurate.
    """
    return INT8_MAX // (2 ** (bits - 1) - 1)


_VECTOR = tf.TensorSpec([None], tf.float64)


@functools.cache
def make_quantize(
    bits: int, has_limits: bool = False
) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """Returns a function that maps `(columns, channel factors)` to `(quantized values, scales)`.

    `columns` is a matrix with the weights of each channel in a column. With `has_limits`, the
    function has a third argument: the clipping limit of each column.
    """
    limits_spec = [tf.TensorSpec([1, None])] if has_limits else []
    levels, divisor = 2 ** (bits - 1) - 1, find_divisor(bits)

    @partial(trace_once, signature=[tf.TensorSpec([None, None]), _VECTOR, *limits_spec])
    def quantize(
        kernel: tf.Tensor, factor: tf.Tensor, *given: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        limits = given[0] if given else fake_quant.channel_limits(kernel, (-1,))
        q = fake_quant.quantize_channels(kernel, limits, bits)
        q *= tf.cast(tf.sign(factor), tf.float32) * divisor
        return q, single(tf.cast(limits, tf.float64) / (levels * divisor) * _get_magnitude(factor))

    return quantize


def _get_magnitude(factor: tf.Tensor) -> tf.Tensor:
    """Return `abs(factor)`, or 1 for a channel that BatchNormalization multiplies by 0."""
    return tf.where(factor == 0.0, tf.ones_like(factor), tf.abs(factor))


def fit_bias(
    q: tf.Tensor,
    scale: tf.Tensor,
    bias: tf.Tensor | None,
    input_scale: tf.Tensor,
    wide: bool,
    divisor: Any = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Increases weight scales until the quantized bias fits 32 bits. Returns new `q` and `scale`.

    Only unused channels need larger scales. The quantized weights `q` stay multiples of `divisor`.
    """
    wider = tf.maximum(scale, LEAST_SCALE)
    if bias is not None and not wide:
        largest = tf.abs(tf.reshape(bias, [-1]))
        if scale.shape.num_elements() == 1:
            largest = tf.reduce_max(largest, keepdims=True)
        wider = tf.maximum(wider, tf.reshape(largest / (input_scale * BIAS_MAX), scale.shape))
    return _widen(q, scale, wider, divisor)


def _find_least_scale(end: Ends) -> tf.Tensor:
    """Return the smallest weight scale for which 32-bit sums can reach the largest output."""
    before, after = (params.as_tensors() for params in end)
    reach = tf.maximum(after.highest - after.zero_point, after.zero_point - after.lowest) + 1.0
    return reach * after.scale / (before.scale * 2.0**31)


def _widen(
    q: tf.Tensor, scale: tf.Tensor, wider: tf.Tensor, divisor: Any = None
) -> tuple[tf.Tensor, tf.Tensor]:
    wider = single(wider)
    return _scale_and_round(q, scale / wider, 1 if divisor is None else divisor), wider


def _scale_and_round(q: tf.Tensor, factor: tf.Tensor, step: Any = 1) -> tf.Tensor:
    """Multiply `q` by channel factors, and round to multiples of `step`."""
    return tf.cond(
        tf.reduce_all(factor == 1.0),
        lambda: tf.identity(q),
        lambda: tf.round(q * tf.cast(factor / step, q.dtype)) * tf.cast(step, q.dtype),
    )


def _make_multipliers_exact(
    q: tf.Tensor, scale: tf.Tensor, ratio: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Round scales, so that int16 TFLite kernels represent the multipliers exactly.

    These kernels round multipliers to 15 bits. The error would be up to 0.003 %. `ratio` is the
    output scale divided by the input scale.
    """
    wider = tf.maximum(scale, LEAST_MULTIPLIER * ratio)
    return _scale_and_round(q, scale / wider), single(exact_multiplier(wider / ratio) * ratio)


def _fold_in_range(wrapper: QuantizeWrapper) -> tuple[Any, Any, Any, float, Any]:
    """Fold and quantize a kernel that was trained with an asymmetric range, by `recipes.contrib`.

    TFLite's weights have no zero point. Without it, quantized values of a channel can exceed 127.
    The channel then gets a larger scale, and is rounded again. Returns quantized weights, scales,
    the bias, and the fields `rounding` and `divisor` of `Weights`.
    """
    factor, bias = compute_factor_and_bias(wrapper, tf.float64)
    if not wrapper.weight_axes:
        return *_fold(wrapper), 0.0, None
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = getattr(wrapper.layer, name).numpy()
    if factor is not None:
        kernel = scale_channels(kernel, axes, tf.cast(factor, tf.float32)).numpy()
    quantizer = wrapper.weight_quantizers[name]
    spec = quantizer.spec
    minimum, maximum = quantizer.current_range(kernel)
    values = fake_quant.fake_quantize(kernel, minimum, maximum, spec.bits, spec.narrow_range)
    levels = 2**spec.bits - (2 if spec.narrow_range else 1)
    scale = (float(maximum) - float(minimum)) / levels or LEAST_SCALE  # 0 if all weights are zeros.
    q = np.round(values.numpy() / scale)
    reduced = tuple(axis for axis in range(-q.ndim, 0) if axis not in axes)
    highest = np.max(np.abs(q), axis=reduced, keepdims=True)
    widening = np.maximum(highest / INT8_MAX, 1.0)
    rounded = np.round(q / widening)
    lost = float(np.max(np.abs(rounded * widening - q), initial=0.0))
    divisor = np.where(widening > 1, 1.0, np.maximum(INT8_MAX // np.maximum(highest, 1.0), 1.0))
    q = tf.constant(rounded * divisor, tf.float32)
    scales = tf.constant(scale * widening / divisor, tf.float64)
    return q, single(scales), bias, lost, divisor if np.max(highest) <= INT4_MAX else None
