"""Sigmoid and hyperbolic tangent of 16 bits, as TFLite's kernel of LSTM computes its gates.

They are approximations in fixed-point numbers of 16 bits: an exponential by a Taylor series and
factors, then a reciprocal by Newton's method. TFLite Micro has others: see `int16_sigmoid`.

Source: gemmlowp's `fixedpoint.h`, for `int16_t`.
"""

from __future__ import annotations

import functools

import numpy as np

from keras_qat.arithmetic.fixed_point import EXPONENTIALS

Numbers = np.ndarray
"""Whole numbers within 16 bits, in int64."""

ONE = 2**15 - 1
"""Represents 1 with 15 bits behind the point."""

ONE_OF_2 = 2**13
"""1 with 13 bits behind the point and 2 in front of it."""


@functools.cache
def sigmoid_table(integer_bits: int) -> Numbers:
    """Tabulates sigmoid(x) in 32768ths for each x of 16 bits, the lowest first.

    Args:
        integer_bits: how many bits of x are in front of the point.
    """
    x = _inputs()
    above = _shifted(_newton(_exponential(-np.abs(x), integer_bits)), 1)
    return np.where(x == 0, 2**14, np.where(x > 0, above, ONE - above))


@functools.cache
def tanh_table(integer_bits: int) -> Numbers:
    """Tabulates tanh(x) like `sigmoid_table`, as (1 - e) / (1 + e) with e = exp(-2 |x|)."""
    x = _inputs()
    reciprocal = _newton(_exponential(-np.abs(x), integer_bits + 1))
    return np.sign(x) * _shifted(reciprocal - ONE_OF_2, 2)


def _inputs() -> Numbers:
    return np.arange(-(2**15), 2**15, dtype=np.int64)


def _exponential(x: Numbers, integer_bits: int) -> Numbers:
    """Computes exp(x) for x up to zero: of the last quarter, times those of powers of two."""
    point = 15 - integer_bits
    quarter = 2 ** (point - 2)
    last = (x & (quarter - 1)) - quarter
    result, rest = _exponential_of_quarter(_shifted(last, integer_bits)), last - x
    for k, power in enumerate(EXPONENTIALS[: integer_bits + 2], -2):
        result = np.where(rest & 2 ** (point + k), _product(result, _constant(power)), result)
    return np.where(x == 0, ONE, result)


def _exponential_of_quarter(x: Numbers) -> Numbers:
    """Computes exp(x) from -1/4 to 0, by a series around -1/8."""
    middle, third = _constant(1895147668), _constant(715827883)
    x = x + 2**12
    square = _product(x, x)
    cube, fourth = _product(square, x), _product(square, square)
    rest = _divided(_product(_divided(fourth, 2) + cube, third) + square, 1)
    return _saturated(middle + _product(middle, x + rest))


def _newton(x: Numbers) -> Numbers:
    """Computes 2 / (1 + x) for x from 0 to 1, with 13 bits behind the point."""
    half = (x + ONE + 1) // 2
    y = _constant(1515870810) + _product(half, _constant(-1010580540))  # 48 / 17, -32 / 17.
    for _ in range(3):
        y = y + _shifted(_product(y, ONE_OF_2 - _product(half, y)), 2)
    return y


def _product(a: Numbers | int, b: Numbers | int) -> Numbers:
    """Returns the upper half of a product, rounding halves up."""
    return np.asarray(a * b + 2**14) >> 15


def _divided(x: Numbers, bits: int) -> Numbers:
    """Computes x / 2^bits, rounding halves away from zero."""
    return np.sign(x) * ((np.abs(x) + 2 ** (bits - 1)) >> bits)


def _shifted(x: Numbers, bits: int) -> Numbers:
    return _saturated(x << bits)


def _saturated(x: Numbers) -> Numbers:
    return np.clip(x, -(2**15), ONE)


def _constant(number: int) -> int:
    """Rounds a number with 31 bits behind the point to 15."""
    return (number + 2**15) >> 16
