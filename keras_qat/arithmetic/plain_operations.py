"""TensorFlow's fake quantization in operations that give the same values on every device.

XLA and kernels of GPUs join a product and the sum behind it, which then round only once, and
numbers between two levels get other codes than on a CPU. Nothing is left to join here: each
operation rounds once by itself, or is exact.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.as_written import hide_constant, is_in_xla, quotient

TINY = float(np.finfo(np.float32).tiny)
"""The least positive number."""
BEYOND = 1 + 2.0**-20
"""Ends of a range times this are outside. A nudged end may be a last bit inside of the data's."""


def are_numbers(minimum: Any, maximum: Any) -> bool:
    """Whether a range is known while a graph is traced."""
    return isinstance(minimum, float) and isinstance(maximum, float)


def fake_quantize(
    x: Any, minimum: Any, maximum: Any, bits: int, narrow_range: bool, is_relu: bool
) -> tuple[Any, Any]:
    """Computes `fake_quant_with_min_max_vars` in the order of operations of its CPU kernel.

    Divisions come before clipping, which changes no value: ends are known numbers of steps then.

    Args:
        x: the tensor, float32.
        minimum, maximum: the range, float numbers or scalar tensors. A `minimum` of the number 0
            saves half of the operations.
        bits, narrow_range: as in `QuantSpec`.
        is_relu: whether it also computes a ReLU of `x`, with a `minimum` of the number 0.

    Returns:
        The tensor, rounded to the levels of the range, and which of its numbers are in the range
        and pass the gradient: a millionth of its width beyond the ends too, but not the zero of a
        ReLU, for which anything below 2^-26 of the range is taken.
    """
    levels = float(2**bits - 1 - narrow_range)
    minimum, maximum = (
        end if isinstance(end, float) else tf.cast(end, tf.float32) for end in (minimum, maximum)
    )
    if isinstance(minimum, float) and minimum == 0.0:
        is_number = isinstance(maximum, float)
        scale = float(np.float32(maximum / levels)) if is_number else quotient(maximum, levels)
        steps = _steps(x, scale, 1.0)
        return _rounded(steps, levels) * scale, _are_between(steps, levels, is_relu)
    minus, below = _minus_scale_and_zero_point(minimum, maximum, levels, narrow_range)
    steps = _steps(below * minus - x, minus, -1.0)
    clipped = tf.minimum(tf.maximum(steps, levels * (1.0 - BEYOND)), levels * BEYOND)
    inside = tf.equal(clipped, steps)
    if are_numbers(minus, below):  # Equal to two differences, but for one number of steps.
        half_below = below - 0.5 if below != 1.0 else 0.5 - 2.0**-25
        return tf.math.ceil(half_below - clipped) * minus, inside
    return tf.math.ceil(below - clipped - hide_constant(0.5)) * minus, inside


def _are_between(steps: Any, levels: float, is_relu: bool) -> Any:
    """Returns which numbers of steps are from 0 to `levels`, for a ReLU above 0.

    By their distance to the middle: two operations, where two comparisons are three.
    """
    middle = np.float32(levels * (BEYOND if is_relu else 1.0) / 2.0)
    farthest = middle if is_relu else np.float32(middle * (2.0 * BEYOND - 1.0))
    return tf.math.squared_difference(steps, middle) < farthest * farthest


def zero_unless(inside: Any, x: Any) -> Any:
    """Returns `x` where `inside` is true, else zero."""
    # Of a single number in place of these, TensorFlow's layout optimizer for GPUs makes an error.
    zeros = tf.zeros([1] * (inside.shape.rank or 0), x.dtype)
    return tf.where(inside, x, zeros)


def _steps(x: Any, scale: Any, sign: float) -> Any:
    """Computes x / scale, for a scale of that sign; of a range of zeros, zeros are zero steps.

    On a GPU TensorFlow swaps the axes of images, and swaps them back before operations that it
    takes for sensitive to their order: `quotient` is one of them, and a division is not.
    """
    if is_in_xla():
        return quotient(x, scale)
    if isinstance(scale, float):
        return tf.raw_ops.RealDiv(x=x, y=hide_constant(scale or sign * TINY))
    apart = tf.maximum if sign > 0 else tf.minimum
    return tf.raw_ops.RealDiv(x=x, y=apart(scale, sign * TINY))


def _minus_scale_and_zero_point(
    minimum: Any, maximum: Any, levels: float, narrow_range: bool
) -> tuple[Any, Any]:
    """Returns minus the scale of a range, as its sign would be an operation, and its zero point.

    Both are numbers if the range is. The zero point is the number of steps below zero.
    """
    if are_numbers(minimum, maximum):
        with tf.init_scope():
            ends = tf.constant(minimum), tf.constant(maximum)
            minus, below = _minus_scale_and_zero_point(*ends, levels, narrow_range)
            return float(minus), float(below)
    minus = quotient(minimum - maximum, levels)
    below = quotient(minimum, minus)
    if narrow_range:  # TensorFlow rounds the sum with the lowest quantized value, 1.
        return minus, _rounded(below + 1.0, levels + 1.0) - 1.0
    return minus, _rounded(below, levels)


def _rounded(steps: Any, levels: float) -> Any:
    """Rounds numbers to whole ones from 0 to `levels`, halves up, by one operation.

    It is TensorFlow's fake quantization for ranges that are known beforehand. With steps of 1 from
    zero on, its products and its sums with zero are exact, whatever a GPU or XLA joins.
    """
    bits = math.ceil(math.log2(levels + 1.0))
    return tf.raw_ops.FakeQuantWithMinMaxArgs(
        inputs=steps, min=0.0, max=levels, num_bits=bits, narrow_range=levels < 2.0**bits - 1.0
    )


def nudged_range(
    minimum: Any, maximum: Any, bits: int = 8, narrow_range: bool = False
) -> tuple[Any, Any]:
    """Returns the range whose ends are levels, as is zero: fake quantization clips to it.

    In the order of operations of TensorFlow's kernel, so equal to the last bit.
    """
    lowest = narrow_range if tf.is_tensor(narrow_range) else float(narrow_range)
    highest = 2.0**bits - 1.0
    scale = quotient(maximum - minimum, highest - lowest)
    # Of zeros alone, as behind a BatchNormalization that starts with gamma = 0, the scale is 0.
    zero_point = tf.floor(lowest - quotient(minimum, scale) + 0.5)
    zero_point = tf.clip_by_value(zero_point, lowest, highest)
    return (lowest - zero_point) * scale, (highest - zero_point) * scale
