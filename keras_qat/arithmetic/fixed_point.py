"""Real numbers as integer kernels hold them, in plain TensorFlow: a multiplier and a shift.

All integers are int64 tensors. TFLite multiplies 32-bit sums by 31-bit multipliers and rounds
twice. Its int16 kernels add up 64 bits, multiply by 15 bits and round once.

Proved equal to TFLite's definitions for all inputs, by an SMT solver in
tests/arithmetic/test_proofs.py: `to_fixed_point`, `multiply`, `divide`, `upper_bits`, and that
`exact_multiplier` loses nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import tensorflow as tf

EXPONENTIALS = (1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242)
"""exp(-2^k) from k = -2 on, with 31 bits behind the point."""

MANTISSA = 52
"""Bits behind the point of a float64."""

LEAST_RATIO = 2.0**-8
"""The least ratio of scales by which int8 values get another scale in one step.

Below it XNNPACK leaves QUANTIZE to TFLite, whose vectorized kernels round halves up and whose
other kernels round halves away from zero: which of them runs depends on an element's position.
"""
FINER_STEPS = 2.0**7
"""Such values first get so many int16 steps for each of theirs. From int16 one kernel rounds."""


def shift(x: Any, bits: Any) -> Any:
    """Computes x * 2^bits."""
    return tf.bitwise.left_shift(x, _in_64_bits(bits))


def shift_back(x: Any, bits: Any) -> Any:
    """Computes x / 2^bits, rounded down."""
    return tf.bitwise.right_shift(x, _in_64_bits(bits))


def _in_64_bits(bits: Any) -> Any:
    """Python's integers get the type by themselves, in an operation less."""
    return bits if isinstance(bits, int) else tf.cast(bits, tf.int64)


def get_exponent(number: Any) -> Any:
    """Returns the exponent of the largest power of two up to a positive float64 number."""
    return shift_back(tf.bitcast(number, tf.int64), MANTISSA) - 1023


def power_of_two(exponent: Any) -> Any:
    """Computes 2^exponent in float64."""
    return tf.bitcast(shift(exponent + 1023, MANTISSA), tf.float64)


def near_power_of_two(number: Any) -> tuple[Any, Any]:
    """Whether kernels take a positive number for a power of two, and of which exponent.

    They do up to 0.07 % off: 0.001 in the logarithm, which they compute in float32.

    Args:
        number: float64, of a float32 number.

    Returns:
        A bool and an int64.
    """
    of_two = np.float32(1) / np.log(np.float32(2))
    logarithm = tf.cast(tf.math.log(number), tf.float32) * of_two
    exponent = tf.round(logarithm)
    return tf.abs(logarithm - exponent) < 1e-3, tf.cast(exponent, tf.int64)


def divide(x: Any, exponent: Any) -> Any:
    """Computes x / 2^exponent, rounding halves away from zero."""
    half = shift_back(shift(tf.ones_like(exponent), exponent), 1)
    return tf.sign(x) * shift_back(tf.abs(x) + half, exponent)


def divide_up(x: Any, exponent: Any) -> Any:
    """Computes x / 2^exponent, rounding halves up."""
    return shift_back(x + shift_back(shift(tf.ones_like(exponent), exponent), 1), exponent)


def high_product(a: Any, b: Any, bits: int = 31) -> Any:
    """Returns twice the upper half of a product of integers of `bits` and a sign, rounded."""
    return shift_back(a * b + 2 ** (bits - 1), bits)


def saturate(x: Any, bits: int) -> Any:
    """Clips whole numbers to those of `bits` and a sign."""
    low, high = (tf.constant(end, tf.int64) for end in (-(2**bits), 2**bits - 1))
    return tf.clip_by_value(x, low, high)


def to_fixed_point(number: Any) -> tuple[Any, Any]:
    """Returns a positive number as a multiplier of 31 bits and a power of two.

    Args:
        number: float32 or float64.

    Returns:
        `multiplier` (2^30 to 2^31 - 1; 0 for what is below 2^-32) and `exponent`, with
        number = multiplier / 2^31 * 2^exponent, up to rounding.
    """
    bits = tf.bitcast(tf.cast(number, tf.float64), tf.int64)
    one = 2**MANTISSA
    multiplier = shift_back((bits & (one - 1)) + (one + 2**21), MANTISSA - 30)
    exponent = shift_back(bits, MANTISSA) - 1022
    carried = shift_back(multiplier, 31)
    multiplier, exponent = shift_back(multiplier, carried), exponent + carried
    return tf.where(exponent < -31, 0 * multiplier, multiplier), tf.maximum(exponent, -31)


def multiply(
    x: Any, number: tuple[Any, Any], rounding: Literal["away", "up", "once"] = "away"
) -> Any:
    """Multiplies whole numbers of 32 bits by a `to_fixed_point` number, rounding twice.

    The second time halves go away from zero; `up` in some optimized kernels, of which those for
    64-bit ARM round only `once`, halves up.
    """
    multiplier, exponent = number
    x, bits = _in_32_bits(shift(x, tf.maximum(exponent, 0))), tf.maximum(-exponent, 0)
    if rounding == "away":
        return divide(high_product(x, multiplier), bits)
    if rounding == "once":
        return divide_up(x * multiplier, bits + 31)
    return divide_up(high_product(x, multiplier), bits)


def _in_32_bits(x: Any) -> Any:
    """Lets numbers that 32 bits do not hold overflow, as in kernels."""
    return tf.cast(tf.cast(x, tf.int32), tf.int64)


def upper_bits(number: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns a `to_fixed_point` number with a multiplier of 15 bits."""
    multiplier, exponent = number
    return tf.minimum(shift_back(multiplier + 2**15, 16), 2**15 - 1), exponent


def multiply_sums(x: Any, number: tuple[Any, Any]) -> Any:
    """Multiplies whole numbers of 48 bits by the upper 15 bits of a `to_fixed_point` number.

    Rounds once, halves up, as int16 kernels do with their sums.
    """
    multiplier, exponent = upper_bits(number)
    half = shift(tf.ones_like(exponent), 14 - exponent)
    return _in_32_bits(shift_back(x * multiplier + half, 15 - exponent))


def exact_multiplier(number: Any) -> Any:
    """Returns the nearest number by which int16 kernels multiply sums without an error.

    It has 15 bits. Powers of two are left out: rounded to float32 in a file's scales, one may
    fall below, where numbers lie twice as close.

    Args:
        number: float64.

    Returns:
        float64, at most 0.0062 % off.
    """
    bits = tf.bitcast(number, tf.int64)
    dropped = MANTISSA - 14
    power, rest = shift_back(bits, MANTISSA), bits & (2**MANTISSA - 1)
    rest = shift_back(rest + 2 ** (dropped - 1), dropped)
    rest = tf.clip_by_value(rest, tf.constant(1, tf.int64), tf.constant(2**14 - 1, tf.int64))
    return tf.bitcast(shift(power, MANTISSA) + shift(rest, dropped), tf.float64)


def inverse_square_root(number: Any) -> tuple[Any, Any]:
    """Computes 1 / sqrt(number) as a multiplier and an exponent, like those of `to_fixed_point`.

    By five steps of Newton's method in 32 bits, with 3 of them in front of the point.

    Args:
        number: whole numbers below 2^31. Of 0 and 1 it is the largest multiplier.
    """
    pairs = shift_back(get_exponent(tf.cast(tf.maximum(number, 1), tf.float64)) + 1, 1)
    # Times a power of four: from 2^27 to 2^29.
    scaled = shift_back(shift(number, 2 * tf.maximum(14 - pairs, 0)), 2 * tf.maximum(pairs - 14, 0))
    half = shift_back(shift_back(scaled, 1) + 1, 1)
    x = tf.fill(tf.shape(number), tf.constant(2**28, tf.int64))
    for _ in range(5):
        cube = shift(high_product(high_product(x, x), x), 6)
        x = shift(high_product(x, 3 * 2**27) - high_product(half, cube), 3)
    multiplier = high_product(x, 1518500250)  # sqrt(1 / 2)
    least = number <= 1
    exponent = 3 - pairs
    multiplier = shift(multiplier, tf.maximum(exponent, 0))
    largest = tf.constant(2**31 - 1, tf.int64)
    return (
        tf.where(least, largest, multiplier),
        tf.where(least, tf.zeros_like(exponent), tf.minimum(exponent, 0)),
    )
