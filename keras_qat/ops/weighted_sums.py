"""Computes weighted operators, such as CONV_2D and FULLY_CONNECTED, with the rounding of kernels.

A weighted operator sums integer products and adds a bias. It then rescales the sum: it multiplies
by input scale x weight scale / output scale, and rounds. The kernels round differently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import cond
from keras_qat.arithmetic.fixed_point import multiply, multiply_sums, to_fixed_point
from keras_qat.arithmetic.plain_operations import has_gpu
from keras_qat.arithmetic.quant_params import single
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments
from keras_qat.ops.weights import Weights, compute_reach, count_terms
from keras_qat.tflite.weight_packing import pack_nibbles

RECENT = tuple(int(part) for part in tf.__version__.split(".")[:2]) >= (2, 17)
"""Whether all kernels of TensorFlow's runtime support a weight scale for each output channel. In
older versions, FULLY_CONNECTED and XNNPACK's TRANSPOSE_CONV do not."""

Rounding = Literal["fixed", "double", "up", "eights"]
"""How TFLite's kernel rescales sums of int8 products. Sums of int16 products always use "fixed".

- `fixed`: multiplies by a 31-bit multiplier, and rounds twice.
- `double`: multiplies in double precision, and rounds halves away from zero.
- `up`: like `fixed` in the reference kernels. The optimized kernels round halves up.
- `eights`: like `up`, but only for complete groups of eight channels. Others are like `fixed`."""

INT8_MAX = 127
"""The largest quantized value of a weight."""

EXACT = 2.0**24
"""Float32 represents all integers below this limit exactly."""

Linear = Callable[[Any, Any], Any]
"""A function of inputs and weights that computes the sums, for example a convolution. Output
channels are the last axis."""


@dataclasses.dataclass(frozen=True)
class Sums:
    """The prepared weights of a weighted operator, with the factor that rescales its sums.

    Args:
        kernel: the weights, in float32 or float64.
        bias: one value for each output channel. None without a bias.
        channels: axes of the weights that are output channels, counted from the end.
        factor: the factor that rescales the sums, in float32, float64 or fixed point.
        rounding: how sums are rescaled. "family" means in float32, by `KernelFamily.sums`.
        fits: whether float32 represents all possible sums exactly.
    """

    kernel: Any
    bias: Any
    channels: tuple[int, ...]
    factor: Any
    rounding: Rounding | Literal["family"]
    fits: Any


def prepare_sums(
    a: Arguments,
    channels: tuple[int, ...],
    rounding: Rounding = "fixed",
    of_int4: Rounding | None = None,
) -> Sums:
    """Returns the `Sums` that `compute_weighted` needs.

    Args:
        channels: axes of the weights that are output channels, counted from the end.
        rounding: how TFLite's kernel rounds. XNNPACK instead multiplies int8 sums in float32, and
            rounds halves to even.
        of_int4: how TFLite's optimized kernel rounds if weights are packed in 4 bits. None if
            XNNPACK has a kernel for these weights.
    """
    weights: Weights = a.weights
    how: Rounding | Literal["family"] = rounding
    if a.family.sums is not None and not a.wide:
        if weights.packed and of_int4 is not None:
            how = of_int4
        elif rounding != "eights":
            how = "family"
    dtype = tf.float64 if a.wide else tf.float32
    bias = None if weights.bias is None else _flatten(weights.bias, dtype)
    before, scale, after = a.params[0].scale, _flatten(weights.scale, tf.float64), a.output.scale
    factor: Any
    if how == "family":
        factor = tf.cast(single(before * scale) / after, tf.float32)
    else:
        factor = before * scale / after
        factor = factor if how == "double" else to_fixed_point(factor)
    q = weights.q  # An array is converted before it becomes a constant of a graph.
    q = tf.constant(q.astype(dtype.as_numpy_dtype)) if isinstance(q, np.ndarray) else q
    return Sums(tf.cast(q, dtype), bias, channels, factor, how, _fits(a, channels))


def _fits(a: Arguments, channels: tuple[int, ...]) -> Any:
    weights: Weights = a.weights
    if a.wide or count_terms(tuple(weights.q.shape), channels) <= _most(a):
        return True
    # The range contains 0, so the largest and the lowest input differ by at most `_largest`.
    reach = compute_reach(weights.q, channels) if weights.reach is None else weights.reach
    fits = reach * _largest(a) < EXACT
    return fits if tf.is_tensor(fits) else bool(fits)


def _largest(a: Arguments) -> int:
    return 2 ** a.params[0].bits - 1


def _most(a: Arguments) -> int:
    """Return how many products float32 can sum exactly, even if all have the largest values."""
    return math.ceil(EXACT / (_largest(a) * INT8_MAX)) - 1


def compute_weighted(a: Arguments, linear: Linear, as_matrices: Linear | None = None) -> Any:
    """Computes a weighted operator after `prepare_sums`.

    Args:
        linear: a function that computes the sums from inputs and weights.
        as_matrices: a function that computes the same sums by a matrix product. On GPUs, only
            matrix products are exact. None if a matrix product would be slow.
    """
    prepared: Sums = a.prepared
    sums_of_8_bits = partial(_sums_of_8_bits, a, linear, as_matrices)
    if prepared.rounding == "family":
        assert a.family.sums is not None
        return a.family.sums(sums_of_8_bits(tf.float32), prepared.factor)
    if a.wide:
        sums = linear(a.q[0], prepared.kernel)
        sums = sums if prepared.bias is None else sums + prepared.bias
        return tf.cast(multiply_sums(tf.cast(sums, tf.int64), prepared.factor), tf.float64)
    sums = sums_of_8_bits(tf.float64)
    if prepared.rounding == "double":
        return tf.cast(_round_half_away(sums * prepared.factor), tf.float32)
    long_sums = tf.cast(sums, tf.int64)
    result = multiply(long_sums, prepared.factor)
    if a.family.optimized and prepared.rounding != "fixed":
        count, is_up = sums.shape[-1], prepared.rounding == "up"
        up = multiply(long_sums, prepared.factor, "once" if a.family.neon and is_up else "up")
        of_up = count if is_up else count // 8 * 8
        result = tf.where(tf.range(count) < of_up, up, result)
    return tf.cast(result, tf.float32)


def _round_half_away(x: Any) -> Any:
    """Round halves away from zero. Just below 0.5, floor(x + 0.5) would be wrong."""
    size = tf.abs(x)
    floor = tf.floor(size)
    return tf.sign(x) * (floor + tf.cast(size - floor >= 0.5, x.dtype))


def _flatten(values: Any, dtype: tf.DType) -> Any:
    return tf.reshape(tf.cast(values, dtype), [-1])


def _sums_of_8_bits(
    a: Arguments, linear: Linear, as_matrices: Linear | None, dtype: tf.DType
) -> Any:
    """Compute the sums of 8-bit products plus the bias, in `dtype`.

    Float32 is exact if all sums are below 2^24, as in most models. Otherwise, the sums are divided
    into groups of input channels. Each group is exact in float32, and float64 adds the groups. As
    in files, the bias is rounded to float32.
    """
    x, kernel, bias = a.q[0], a.prepared.kernel, a.prepared.bias
    has_groups = len(kernel.shape) > 2 and x.shape[-1] != kernel.shape[-2]

    def add_bias(sums: Any) -> Any:
        if bias is not None:
            values = tf.cast(bias, sums.dtype)
            # TensorFlow would fuse bias_add with a grouped convolution. CPUs without oneDNN have no
            # kernel for the fused operation.
            sums = sums + values if has_groups else tf.nn.bias_add(sums, values)
        # TensorFlow can fuse a ReLU, but not a clip.
        return tf.nn.relu(sums) if a.merges_relu else sums

    def products(x: Any, kernel: Any) -> Any:
        is_wide = math.prod(kernel.shape[:-2]) > 1
        if not (has_gpu() and is_wide and len(a.prepared.channels) == 1):
            return linear(x, kernel)
        # GPUs may compute convolutions by Winograd or FFT, with rounding errors in float32.
        if as_matrices is not None and not has_groups:
            return as_matrices(x, kernel)
        return tf.round(linear(tf.cast(x, tf.float64), tf.cast(kernel, tf.float64)))

    def compute_at_once() -> Any:
        return add_bias(tf.cast(products(x, kernel), dtype))

    def compute_in_groups() -> Any:
        channels, inputs = a.prepared.channels, kernel.shape[-2]
        count = count_terms(tuple(kernel.shape), channels)
        size = _most(a) * inputs // count  # The number of channels with exact sums.
        if channels != (-1,) or x.shape[-1] != inputs or not size:
            sums = linear(tf.cast(x, tf.float64), tf.cast(kernel, tf.float64))
        else:
            sizes = [min(size, inputs - start) for start in range(0, inputs, size)]
            groups = zip(tf.split(x, sizes, -1), tf.split(kernel, sizes, -2), strict=True)
            sums = tf.add_n([tf.cast(products(*group), tf.float64) for group in groups])
        return tf.cast(add_bias(sums), dtype)

    return cond(a.prepared.fits, compute_at_once, compute_in_groups)


def weight_constants(
    e: Emission, arrange: Callable[[np.ndarray], np.ndarray], axis: int
) -> list[int]:
    """Adds an operator's weights and bias to a file, and returns their tensors.

    A layer without bias gets zeros, because XNNPACK requires a bias for convolutions. The type of
    the bias, int32 or int64, is also the type of the sums in int16 kernels.

    Args:
        arrange: converts the weights from the layer's shape to the file's shape.
        axis: the axis of the output channels in the file.
    """
    weights = e.weights
    q = arrange(np.asarray(weights.q).astype(np.int8))
    scales = np.asarray(weights.scale, np.float32).reshape(-1)
    shape, dtype, data = q.shape, "int8", q
    bias = np.zeros(shape[axis]) if weights.bias is None else np.asarray(weights.bias).reshape(-1)
    if weights.packed:
        data, dtype = pack_nibbles(q), "int4"
    input_scale = np.float32(e.input_params.scale)
    integers = bias.astype(np.int64) if e.wide else np.float32(bias).astype(np.int32)
    return [
        e.constant("weights", data, scales=scales, axis=axis, shape=shape, dtype=dtype),
        e.constant("bias", integers, scales=input_scale * scales),
    ]
