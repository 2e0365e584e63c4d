"""Sigmoid and hyperbolic tangent in fixed-point numbers, as gemmlowp computes them.

An exponential by a Taylor series and factors, then a reciprocal by Newton's method. TFLite's kernel
of LSTM computes its gates so in 16 bits, TFLite Micro's int8 kernels of both functions in 32. For
LSTM gates TFLite Micro has others: see `int16_sigmoid`.

Source: gemmlowp's `fixedpoint.h`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.fixed_point import EXPONENTIALS, divide, high_product, saturate, shift


def compute_sigmoid(x: Any, integer_bits: int, bits: int = 31) -> Any:
    """Computes sigmoid(x), with as many bits behind the point as there are.

    Args:
        x: whole numbers in int64.
        integer_bits: how many of their bits are in front of the point.
        bits: how many bits they have, but for the sign: 15 or 31.
    """
    reciprocal = _reciprocal(_exponential(-tf.abs(x), integer_bits, bits), bits)
    above = saturate(shift(reciprocal, 1), bits)
    below = tf.where(x == 0, tf.constant(2 ** (bits - 1), tf.int64), 2**bits - 1 - above)
    return tf.where(x > 0, above, below)


def compute_tanh(x: Any, integer_bits: int, bits: int = 31) -> Any:
    """Computes tanh(x) like `compute_sigmoid`, as (1 - e) / (1 + e) with e = exp(-2 |x|)."""
    reciprocal = _reciprocal(_exponential(-tf.abs(x), integer_bits + 1, bits), bits)
    return tf.sign(x) * saturate(shift(reciprocal - 2 ** (bits - 2), 2), bits)


@functools.cache
def sigmoid_table(integer_bits: int) -> np.ndarray:
    """Tabulates sigmoid(x) in 32768ths for each x of 16 bits, the lowest first."""
    return _table(compute_sigmoid, integer_bits)


@functools.cache
def tanh_table(integer_bits: int) -> np.ndarray:
    """Tabulates tanh(x) like `sigmoid_table`."""
    return _table(compute_tanh, integer_bits)


def _table(function: Callable[..., Any], integer_bits: int) -> np.ndarray:
    with tf.init_scope():
        x = tf.range(-(2**15), 2**15, dtype=tf.int64)
        return np.asarray(function(x, integer_bits, 15))


def _exponential(x: Any, integer_bits: int, bits: int) -> Any:
    """Computes exp(x) for x up to zero: of the last quarter, times those of powers of two."""
    point = bits - integer_bits
    quarter = 2 ** (point - 2)
    last = (x & (quarter - 1)) - quarter
    result = _exponential_of_quarter(saturate(shift(last, integer_bits), bits), bits)
    rest = last - x
    for k, power in enumerate(EXPONENTIALS[: integer_bits + 2], -2):
        multiplied = high_product(result, _constant(power, bits), bits)
        result = tf.where(rest & 2 ** (point + k) != 0, multiplied, result)
    return tf.where(x == 0, tf.constant(2**bits - 1, tf.int64), result)


def _exponential_of_quarter(x: Any, bits: int) -> Any:
    """Computes exp(x) from -1/4 to 0, by a series around -1/8."""
    middle, third = _constant(1895147668, bits), _constant(715827883, bits)
    x = x + 2 ** (bits - 3)
    square = high_product(x, x, bits)
    cube, fourth = high_product(square, x, bits), high_product(square, square, bits)
    sixth = high_product(divide(fourth, _bits(2)) + cube, third, bits)
    rest = divide(sixth + square, _bits(1))
    return saturate(middle + high_product(x + rest, middle, bits), bits)


def _reciprocal(x: Any, bits: int) -> Any:
    """Computes 2 / (1 + x) for x from 0 to 1, with 2 bits less behind the point."""
    half = (x + 2**bits) // 2
    y = high_product(half, _constant(-1010580540, bits), bits) + _constant(1515870810, bits)
    for _ in range(3):  # From 48 / 17 - 32 / 17 x on.
        rest = 2 ** (bits - 2) - high_product(half, y, bits)
        y = y + saturate(shift(high_product(y, rest, bits), 2), bits)
    return y


def _constant(number: int, bits: int) -> int:
    """Rounds a number with 31 bits behind the point to 15, or leaves it."""
    return number if bits == 31 else (number + 2**15) >> 16


def _bits(count: int) -> Any:
    return tf.constant(count, tf.int64)
