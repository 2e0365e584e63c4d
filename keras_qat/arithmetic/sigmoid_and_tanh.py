"""Sigmoid and hyperbolic tangent in integers, like TFLite's kernels.

`compute_sigmoid` and `compute_tanh` follow `fixedpoint.h` of gemmlowp, Google's library for integer
matrices. A Taylor series computes the exponential, and Newton's method the reciprocal. TFLite's
LSTM kernel computes its gates in this way with 16-bit integers. TFLite Micro's int8 kernels of
LOGISTIC and TANH use 32-bit integers.

`compute_int16_sigmoid` and `compute_int16_tanh` are the int16 operators LOGISTIC and TANH, which
interpolate in a table of the sigmoid. If the scale of the input is almost 2^-12, TFLite's optimized
kernels follow gemmlowp instead. For TANH, they also do this if the scale is almost 2^-11.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import Predicate, cond, trace_once
from keras_qat.arithmetic.fixed_point import (
    exponential,
    near_power_of_two,
    power_of_two,
    reciprocal,
    saturate,
    shift,
    shift_back,
)
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.plain_operations import gather

INTEGER_BITS = 3
"""16-bit inputs have 3 bits before the binary point, 12 bits after it, and a sign."""


def compute_sigmoid(x: tf.Tensor, integer_bits: int, bits: int = 31) -> tf.Tensor:
    """Computes sigmoid(x) as gemmlowp does. The result is a multiple of 2^-bits.

    Args:
        x: int64 tensor of multiples of 2^(integer_bits - bits).
        integer_bits: number of bits of `x` before the binary point.
        bits: number of bits of `x` without the sign, 15 or 31.
    """
    half = reciprocal(exponential(-tf.abs(x), integer_bits, bits), bits)
    above = saturate(shift(half, 1), bits)
    below = tf.where(x == 0, tf.constant(2 ** (bits - 1), tf.int64), 2**bits - 1 - above)
    return tf.where(x > 0, above, below)


def compute_tanh(x: tf.Tensor, integer_bits: int, bits: int = 31) -> tf.Tensor:
    """Computes tanh(x). The arguments are the same as in `compute_sigmoid`."""
    # The magnitude is (1 - e) / (1 + e) with e = exp(-2 |x|).
    half = reciprocal(exponential(-tf.abs(x), integer_bits + 1, bits), bits)
    return tf.sign(x) * saturate(shift(half - 2 ** (bits - 2), 2), bits)


@functools.cache
def sigmoid_table(integer_bits: int) -> np.ndarray:
    """Returns `compute_sigmoid` for all 65,536 values of a 16-bit x, from the lowest one."""
    return _tabulate(compute_sigmoid, integer_bits)


@functools.cache
def tanh_table(integer_bits: int) -> np.ndarray:
    """Returns `compute_tanh` for all 65,536 values of a 16-bit x, from the lowest one."""
    return _tabulate(compute_tanh, integer_bits)


def _tabulate(function: Callable[[tf.Tensor, int, int], tf.Tensor], bits: int) -> np.ndarray:
    with tf.init_scope():
        return np.asarray(function(tf.range(-(2**15), 2**15, dtype=tf.int64), bits, 15))


@dataclasses.dataclass(frozen=True)
class Curve:
    """Constants of an int16 sigmoid or tanh, which depend on the scale of the input.

    Args:
        is_power: true if the kernel follows gemmlowp, because the scale is 2^-12 or 2^-11.
        left: number of bits by which gemmlowp's input is shifted to the left, 0 or 1.
        factor, bits: for the interpolation, `q * factor / 2^bits` is the table's index times 512.
            For TANH, it is the index times 256.
    """

    is_power: Predicate
    left: tf.Tensor
    factor: tf.Tensor
    bits: tf.Tensor


def prepare_sigmoid(family: KernelFamily, scale: tf.Tensor) -> Curve:
    return _prepare(family, scale, wider=0)


def prepare_tanh(family: KernelFamily, scale: tf.Tensor) -> Curve:
    return _prepare(family, scale, wider=1)


def _prepare(family: KernelFamily, scale: tf.Tensor, wider: int) -> Curve:
    """Compute a `Curve`. `wider` is 1 for TANH, which follows gemmlowp also at a scale of 2^-11."""
    is_power, left, scale = _as_power(scale, wider)
    has_gates = family.int16_curves == "gates"
    return Curve(is_power if has_gates else False, left, *_scale_to_table(scale))


@trace_once
def _as_power(scale: tf.Tensor, wider: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return `is_power`, `left` and the scale. If `is_power`, the scale is a power of two."""
    is_near, exponent = near_power_of_two(scale)
    left = exponent + 15 - INTEGER_BITS
    is_power = is_near & (left >= 0) & (left <= wider)
    left = tf.clip_by_value(left, 0, wider)
    return is_power, left, tf.where(is_power, power_of_two(exponent), scale)


@trace_once
def _scale_to_table(scale: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return `factor` and `bits` of a `Curve`."""
    factor, bits = scale * (3 * 4096.0), tf.zeros([], tf.int64)
    for _ in range(31):
        small = factor <= 32767.0 / 2.0
        factor, bits = tf.where(small, 2 * factor, factor), bits + tf.cast(small, tf.int64)
    return tf.cast(factor, tf.int64), bits


def compute_int16_sigmoid(q: tf.Tensor, curve: Curve) -> tf.Tensor:
    """Computes LOGISTIC for int16 values `q`. The results are multiples of 1/32768, as int64."""

    def interpolate(steps: tf.Tensor) -> tf.Tensor:
        y = _interpolate(tf.abs(steps), 9)
        return shift_back(tf.where(steps >= 0, y + 2**9, 2**25 - y + 2**9 - 1), 10)

    return _compute(q, curve, interpolate, sigmoid_table)


def compute_int16_tanh(q: tf.Tensor, curve: Curve) -> tf.Tensor:
    """Computes TANH for int16 values `q`. The results are multiples of 1/32768, as int64."""

    def interpolate(steps: tf.Tensor) -> tf.Tensor:
        y = _interpolate(tf.abs(steps), 8)
        return shift_back(tf.where(steps >= 0, y - 2**23 + 2**7, 2**23 - y + 2**7 - 1), 8)

    return _compute(q, curve, interpolate, tanh_table)


def _compute(
    q: tf.Tensor,
    curve: Curve,
    interpolate: Callable[[tf.Tensor], tf.Tensor],
    table: Callable[[int], np.ndarray],
) -> tf.Tensor:
    q = tf.cast(q, tf.int64)

    def compute_gates() -> tf.Tensor:
        positions = saturate(shift(q, curve.left), 15) + 2**15
        entries = gather(tf.constant(table(INTEGER_BITS).astype(np.int16)), positions)
        return tf.cast(entries, tf.int64)

    def compute_by_interpolation() -> tf.Tensor:
        half = shift_back(shift(tf.ones_like(curve.bits), curve.bits), 1)
        return interpolate(shift_back(q * curve.factor + half, curve.bits))

    return cond(curve.is_power, compute_gates, compute_by_interpolation)


def _interpolate(size: tf.Tensor, bits: int) -> tf.Tensor:
    """Return 2^bits times the interpolated entry of `_points()` at the index `size / 2^bits`."""
    table = tf.constant(_points(), tf.int64)
    last = 2**16 - 1 if bits == 8 else 2**16 - 2
    index = shift_back(size, bits)
    low, high = (gather(table, tf.clip_by_value(index + step, 0, 255)) for step in (0, 1))
    y = shift(low, bits) + (size & (2**bits - 1)) * (high - low)
    return tf.where(index >= 255, shift(tf.constant(last, tf.int64), bits), y)


@functools.cache
def _points() -> np.ndarray:
    """Return TFLite's table of 65536 * sigmoid(k / 24) for k from 0 to 255.

    Half of the largest interpolation error is added to each entry. Without it, all interpolated
    values would be too small, because this half of the sigmoid is concave.
    """
    sigmoid = 1 / (1 + np.exp(-np.arange(256) / 24))
    curvature = sigmoid * (1 - sigmoid) * (2 * sigmoid - 1) / 24**2
    values = np.floor(65536 * (sigmoid + curvature / 16) + 0.5).astype(np.int64)
    values[-1] = 65535
    return values
