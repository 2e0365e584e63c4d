"""Sigmoid and hyperbolic tangent of 16 bits, as TFLite's operators LOGISTIC and TANH compute them.

Both follow lines through one table of the sigmoid. Steps next to 2^-12, of tanh also next to 2^-11,
count as those: the portable kernels follow the same lines for them, the optimized one computes the
approximations of `gemmlowp`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import cond, trace_once
from keras_qat.arithmetic.fixed_point import (
    near_power_of_two,
    power_of_two,
    saturate,
    shift,
    shift_back,
)
from keras_qat.arithmetic.gemmlowp import sigmoid_table, tanh_table
from keras_qat.arithmetic.kernel_families import KernelFamily

INTEGER_BITS = 3
"""Bits in front of the point of the inputs of `gemmlowp`, in steps of 2^-12."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """The prepared numbers of a sigmoid or hyperbolic tangent.

    Args:
        is_power: whether the scale counts as a power of two for the family's kernel.
        left: how many powers of two above 2^-12 it is then.
        factor, bits: multiplier and shift from quantized values to positions in the table.
    """

    is_power: Any
    left: Any
    factor: Any
    bits: Any


def prepare_sigmoid(family: KernelFamily, scale: Any) -> Curve:
    """Prepares `compute_int16_sigmoid` for inputs of this scale, with the zero point 0."""
    return _prepared(family, scale, wider=0)


def prepare_tanh(family: KernelFamily, scale: Any) -> Curve:
    """Prepares `compute_int16_tanh` for inputs of this scale, with the zero point 0."""
    return _prepared(family, scale, wider=1)


def _prepared(family: KernelFamily, scale: Any, wider: int) -> Curve:
    """Prepares a curve whose kernels treat steps of 2^-12 up to `wider` doublings differently."""
    is_power, left, scale = _as_power(scale, wider)
    has_gates = family.int16_curves == "gates"
    return Curve(is_power if has_gates else False, left, *_factor_to_table(scale))


def compute_int16_sigmoid(q: Any, numbers: Curve) -> Any:
    """Computes sigmoid(x) of quantized values, in 32768ths, as int64."""
    return _of_int16(q, numbers, _sigmoid_along_lines, sigmoid_table)


def compute_int16_tanh(q: Any, numbers: Curve) -> Any:
    """Computes tanh(x) = 2 sigmoid(2x) - 1 of quantized values, in 32768ths, as int64."""
    return _of_int16(q, numbers, _tanh_along_lines, tanh_table)


def _of_int16(
    q: Any,
    numbers: Curve,
    along_lines: Callable[[Any, Curve], Any],
    table: Callable[[int], np.ndarray],
) -> Any:
    q = tf.cast(q, tf.int64)

    def by_gates() -> Any:
        positions = saturate(shift(q, numbers.left), 15) + 2**15
        entries = tf.gather(tf.constant(table(INTEGER_BITS).astype(np.int16)), positions)
        return tf.cast(entries, tf.int64)

    return cond(numbers.is_power, by_gates, lambda: along_lines(q, numbers))


@trace_once
def _as_power(scale: Any, wider: int) -> tuple[Any, Any, Any]:
    """Whether a scale counts as a power of two, how far above 2^-12, and the scale that counts."""
    is_near, exponent = near_power_of_two(scale)
    left = exponent + 15 - INTEGER_BITS
    is_power = is_near & (left >= 0) & (left <= wider)
    left = tf.clip_by_value(left, 0, wider)
    return is_power, left, tf.where(is_power, power_of_two(exponent), scale)


def _sigmoid_along_lines(q: Any, numbers: Curve) -> Any:
    """Interpolates in a table of 256 values, 1/24 apart, with 512 steps between two of them."""
    steps, size = _in_steps(q, numbers)
    ahead = _between(size, 9)
    return shift_back(tf.where(steps >= 0, ahead + 2**9, 2**25 - ahead + 2**9 - 1), 10)


def _tanh_along_lines(q: Any, numbers: Curve) -> Any:
    """Computes 2 sigmoid(2x) - 1 with the table of the sigmoid."""
    steps, size = _in_steps(q, numbers)
    ahead = _between(size, 8)
    return shift_back(tf.where(steps >= 0, ahead - 2**23 + 2**7, 2**23 - ahead + 2**7 - 1), 8)


def _in_steps(q: Any, numbers: Curve) -> tuple[Any, Any]:
    """Returns numbers in steps of 1/12288, by a multiplier of 14 to 15 bits, and magnitudes."""
    half = shift_back(shift(tf.ones_like(numbers.bits), numbers.bits), 1)
    steps = shift_back(q * numbers.factor + half, numbers.bits)
    return steps, tf.abs(steps)


@trace_once
def _factor_to_table(scale: Any) -> tuple[Any, Any]:
    factor, bits = scale * (3 * 4096.0), tf.zeros([], tf.int64)
    for _ in range(31):
        small = factor <= 32767.0 / 2.0
        factor, bits = tf.where(small, 2 * factor, factor), bits + tf.cast(small, tf.int64)
    return tf.cast(factor, tf.int64), bits


def _between(size: Any, bits: int) -> Any:
    """Interpolates linearly in the table of the sigmoid, with `bits` more bits."""
    table = tf.constant(_points(), tf.int64)
    last = 2**16 - 1 if bits == 8 else 2**16 - 2
    index = shift_back(size, bits)
    low, high = (tf.gather(table, tf.clip_by_value(index + step, 0, 255)) for step in (0, 1))
    between = shift(low, bits) + (size & (2**bits - 1)) * (high - low)
    return tf.where(index >= 255, shift(tf.constant(last, tf.int64), bits), between)


@functools.cache
def _points() -> np.ndarray:
    """Tabulates sigmoid(k / 24) in 65536ths, higher by half of what a line falls short of it.

    That is a sixteenth of the curvature. The last value stands for all above.
    """
    sigmoid = 1 / (1 + np.exp(-np.arange(256) / 24))
    curvature = sigmoid * (1 - sigmoid) * (2 * sigmoid - 1) / 24**2
    values = np.floor(65536 * (sigmoid + curvature / 16) + 0.5).astype(np.int64)
    values[-1] = 65535
    return values
