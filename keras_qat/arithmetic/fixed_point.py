"""Fixed-point arithmetic of TFLite's integer kernels, computed with TensorFlow.

Kernels multiply sums by a factor, such as 0.0123, with integer arithmetic only. The factor is a
fixed-point value: an integer multiplier times a power of two. TFLite's int8 kernels multiply 32-bit
sums by 31-bit multipliers and round twice. The int16 kernels multiply 64-bit sums by 15-bit
multipliers and round once. All integers are int64 tensors here. Bit counts exclude the sign.

`tests/arithmetic/test_proofs.py` proves for all inputs that `to_fixed_point`, `multiply`, `divide`
and `upper_bits` equal TFLite's definitions.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import tensorflow as tf

Integer: TypeAlias = int | tf.Tensor

FixedPoint = tuple[tf.Tensor, tf.Tensor]
"""A pair `(multiplier, exponent)` for the number multiplier / 2^31 * 2^exponent."""

AWAY = 1 + 2.0**-40
"""`tf.round(AWAY * x)` rounds halves away from zero. `tf.round(x)` rounds halves to even.

With `AWAY`, x must be n / 2^k with an integer n below 2^39."""

EXPONENTIALS = (1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242)
"""exp(-1/4), exp(-1/2), exp(-1), exp(-2) up to exp(-16), as multiples of 2^-31."""

MANTISSA = 52
"""Fractional bits of a float64."""

LEAST_RATIO = 2.0**-8
"""The smallest `input_scale / output_scale` of a QUANTIZE from int8 to int8 in exported files.

For smaller ratios, files have two QUANTIZE: to int16, then to int8. XNNPACK does not support such
ratios, and TFLite's own kernel rounds halves inconsistently.
"""
FINER_STEPS = 2.0**7
"""If a file converts int8 to int8 by way of int16, one int8 step has this many int16 steps."""


def shift(x: tf.Tensor, bits: Integer) -> tf.Tensor:
    """Computes x * 2^bits for integers."""
    return tf.bitwise.left_shift(x, _as_int64(bits))


def shift_back(x: tf.Tensor, bits: Integer) -> tf.Tensor:
    """Computes x / 2^bits for integers, rounded down."""
    return tf.bitwise.right_shift(x, _as_int64(bits))


def _as_int64(bits: Integer) -> Integer:
    # Python integers need no operation.
    return bits if isinstance(bits, int) else tf.cast(bits, tf.int64)


def get_exponent(x: tf.Tensor) -> tf.Tensor:
    """Returns floor(log2(x)) for positive float64 values."""
    return shift_back(tf.bitcast(x, tf.int64), MANTISSA) - 1023


def power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Computes 2^exponent in float64."""
    return tf.bitcast(shift(exponent + 1023, MANTISSA), tf.float64)


def near_power_of_two(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns `(is_near, exponent)` of the nearest power of two. Near means less than 0.07 % off.

    TFLite's int16 kernels of LOGISTIC and TANH treat such scales as powers of two.
    """
    of_two = np.float32(1) / np.log(np.float32(2))
    logarithm = tf.cast(tf.math.log(x), tf.float32) * of_two
    exponent = tf.round(logarithm)
    return tf.abs(logarithm - exponent) < 1e-3, tf.cast(exponent, tf.int64)


def divide(x: tf.Tensor, exponent: tf.Tensor) -> tf.Tensor:
    """Computes x / 2^exponent, rounding halves away from zero."""
    half = shift_back(shift(tf.ones_like(exponent), exponent), 1)
    return tf.sign(x) * shift_back(tf.abs(x) + half, exponent)


def divide_up(x: tf.Tensor, exponent: tf.Tensor) -> tf.Tensor:
    """Computes x / 2^exponent, rounding halves up."""
    return shift_back(x + shift_back(shift(tf.ones_like(exponent), exponent), 1), exponent)


def high_product(a: tf.Tensor, b: Integer, bits: int = 31) -> tf.Tensor:
    """Computes a * b / 2^bits, rounding halves up. `a` and `b` have at most `bits` bits."""
    return shift_back(a * b + 2 ** (bits - 1), bits)


def saturate(x: tf.Tensor, bits: int) -> tf.Tensor:
    """Clips integers to the range -2^bits to 2^bits - 1."""
    low, high = (tf.constant(end, x.dtype) for end in (-(2**bits), 2**bits - 1))
    return tf.clip_by_value(x, low, high)


def to_fixed_point(x: float | tf.Tensor) -> FixedPoint:
    """Converts a positive float to fixed point, as TFLite does when it loads a file.

    The multiplier is from 2^30 to 2^31 - 1. It is 0 if `x` is below 2^-32.
    """
    bits = tf.bitcast(tf.cast(x, tf.float64), tf.int64)
    one = 2**MANTISSA
    multiplier = shift_back((bits & (one - 1)) + (one + 2**21), MANTISSA - 30)
    exponent = shift_back(bits, MANTISSA) - 1022
    carried = shift_back(multiplier, 31)
    multiplier, exponent = shift_back(multiplier, carried), exponent + carried
    return tf.where(exponent < -31, 0 * multiplier, multiplier), tf.maximum(exponent, -31)


def multiply(
    x: tf.Tensor, factor: FixedPoint, rounding: Literal["away", "up", "once"] = "away"
) -> tf.Tensor:
    """Multiplies 32-bit integers by a fixed-point value, and rounds.

    With "away" and "up", the product is first rounded to 32 bits, and then divided by a power of
    two. The division rounds halves away from zero or up, respectively. With "once", only the final
    result is rounded, with halves up. Some optimized kernels use "up", or "once" on 64-bit ARM.
    """
    multiplier, exponent = factor
    x, bits = _overflow(shift(x, tf.maximum(exponent, 0))), tf.maximum(-exponent, 0)
    if rounding == "away":
        return divide(high_product(x, multiplier), bits)
    if rounding == "once":
        return divide_up(x * multiplier, bits + 31)
    return divide_up(high_product(x, multiplier), bits)


def _overflow(x: tf.Tensor) -> tf.Tensor:
    """Let integers overflow as in an int32."""
    return tf.cast(tf.cast(x, tf.int32), tf.int64)


def to_floats(factor: FixedPoint) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the argument `factors` of `multiply_floats` for a fixed-point value."""
    multiplier, exponent = factor
    first = tf.cast(multiplier, tf.float64) * power_of_two(tf.maximum(exponent, 0) - 31)
    return first, power_of_two(tf.minimum(exponent, 0)) * AWAY


def multiply_floats(x: tf.Tensor, factors: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    """Computes the same as `multiply`, three times as fast, for integers stored in float64.

    `x` must have at most 22 bits, and `multiply` must not overflow.
    """
    first, second = factors
    return tf.round(tf.floor(x * first + 0.5) * second)


def divide_floats(x: tf.Tensor, bits: int) -> tf.Tensor:
    """Computes the same as `divide`, for integers below 2^39 stored in float64."""
    return tf.round(x * (2.0**-bits * AWAY))


def upper_bits(factor: FixedPoint) -> FixedPoint:
    """Rounds the multiplier of a fixed-point value to 15 bits."""
    multiplier, exponent = factor
    return tf.minimum(shift_back(multiplier + 2**15, 16), 2**15 - 1), exponent


def multiply_sums(x: tf.Tensor, factor: FixedPoint) -> tf.Tensor:
    """Multiplies 48-bit integers by a fixed-point value, as int16 kernels do.

    The multiplier is first rounded to 15 bits. The product is rounded with halves up.
    """
    multiplier, exponent = upper_bits(factor)
    half = shift(tf.ones_like(exponent), 14 - exponent)
    return _overflow(shift_back(x * multiplier + half, 15 - exponent))


def exact_multiplier(x: tf.Tensor) -> tf.Tensor:
    """Rounds a float64 factor for sums to a value that `multiply_sums` does not round again.

    The result has 15 bits, with a relative error of at most 0.0062 %. It is never a power of two.
    When scales are rounded to float32, a power of two may become smaller and need more bits.
    """
    bits = tf.bitcast(x, tf.int64)
    dropped = MANTISSA - 14
    power, rest = shift_back(bits, MANTISSA), bits & (2**MANTISSA - 1)
    rest = shift_back(rest + 2 ** (dropped - 1), dropped)
    rest = tf.clip_by_value(rest, tf.constant(1, tf.int64), tf.constant(2**14 - 1, tf.int64))
    return tf.bitcast(shift(power, MANTISSA) + shift(rest, dropped), tf.float64)


def inverse_square_root(x: tf.Tensor) -> FixedPoint:
    """Computes 1 / sqrt(x) in fixed point for integers below 2^31.

    Like TFLite, it makes five steps of Newton's method. The result for 0 is the same as for 1.
    """
    pairs = shift_back(get_exponent(tf.cast(tf.maximum(x, 1), tf.float64)) + 1, 1)
    # Scale x by a power of four to a value from 2^27 to 2^29.
    scaled = shift_back(shift(x, 2 * tf.maximum(14 - pairs, 0)), 2 * tf.maximum(pairs - 14, 0))
    half = shift_back(shift_back(scaled, 1) + 1, 1)
    y = tf.fill(tf.shape(x), tf.constant(2**28, tf.int64))
    for _ in range(5):
        cube = shift(high_product(high_product(y, y), y), 6)
        y = shift(high_product(y, 3 * 2**27) - high_product(half, cube), 3)
    multiplier = high_product(y, 1518500250)  # sqrt(1 / 2)
    least = x <= 1
    exponent = 3 - pairs
    multiplier = shift(multiplier, tf.maximum(exponent, 0))
    largest = tf.constant(2**31 - 1, tf.int64)
    return (
        tf.where(least, largest, multiplier),
        tf.where(least, tf.zeros_like(exponent), tf.minimum(exponent, 0)),
    )


def exponential(x: tf.Tensor, integer_bits: int, bits: int = 31) -> tf.Tensor:
    """Computes exp(x) for x <= 0 as gemmlowp does. The result is a multiple of 2^-bits.

    `x` is split into parts, such as -2 and -1/4, and a rest from -1/4 to 0. `EXPONENTIALS` has the
    exponentials of the parts. A Taylor series computes the exponential of the rest.

    Args:
        x: integers, as multiples of 2^(integer_bits - bits).
        integer_bits: number of bits of `x` before the binary point.
        bits: 31, or 15 for 16-bit arithmetic.
    """
    point = bits - integer_bits
    quarter = 2 ** (point - 2)
    last = (x & (quarter - 1)) - quarter
    result = _exponential_of_quarter(saturate(shift(last, integer_bits), bits), bits)
    rest = last - x
    for k, power in enumerate(EXPONENTIALS[: integer_bits + 2], -2):
        multiplied = high_product(result, _round_constant(power, bits), bits)
        result = tf.where(rest & 2 ** (point + k) != 0, multiplied, result)
    return tf.where(x == 0, tf.constant(2**bits - 1, tf.int64), result)


def _exponential_of_quarter(x: tf.Tensor, bits: int) -> tf.Tensor:
    """Compute exp(x) for x from -1/4 to 0 with a Taylor series around -1/8."""
    middle, third = (_round_constant(value, bits) for value in (1895147668, 715827883))
    one, two = (tf.constant(count, tf.int64) for count in (1, 2))
    x = x + 2 ** (bits - 3)
    square = high_product(x, x, bits)
    cube, fourth = high_product(square, x, bits), high_product(square, square, bits)
    sixth = high_product(divide(fourth, two) + cube, third, bits)
    rest = divide(sixth + square, one)
    return saturate(middle + high_product(x + rest, middle, bits), bits)


def reciprocal(x: tf.Tensor, bits: int = 31) -> tf.Tensor:
    """Computes 2 / (1 + x) for x from 0 to 1 as gemmlowp does.

    `x` is a multiple of 2^-bits, and the result is a multiple of 2^(2 - bits).
    """
    half = (x + 2**bits) // 2
    y = high_product(half, _round_constant(-1010580540, bits), bits)
    y += _round_constant(1515870810, bits)
    for _ in range(3):  # Newton's method, starting at 48/17 - 32/17 * half.
        rest = 2 ** (bits - 2) - high_product(half, y, bits)
        y = y + saturate(shift(high_product(y, rest, bits), 2), bits)
    return y


def _round_constant(value: int, bits: int) -> int:
    """Convert a multiple of 2^-31 to a multiple of 2^-15 if `bits` is 15."""
    return value if bits == 31 else (value + 2**15) >> 16
