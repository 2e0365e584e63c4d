"""Softmax of codes: TFLite's kernels, as XNNPACK does not take it.

The default one looks up exponentials in float32. The reference one, which microcontrollers have,
computes them in 32-bit fixed-point numbers: Qn has n integer bits, a sign and 31 - n bits behind
the point.
"""

from __future__ import annotations

import numpy as np

from keras_qat.simulate.arithmetic import divide_by_power_of_two, fixed_point, high_product
from keras_qat.simulate.codes import LOW, Codes, Grid

__all__ = ["softmax"]

ONE = 2**31 - 1
"""1 in Q0, as near as it can be."""


def softmax(kernels: str, x: Codes, output: Grid) -> np.ndarray:
    """Softmax over the last axis; the output has 256 steps from 0 to 1."""
    if kernels == "reference":
        return _fixed_point_softmax(x)
    # 0 to 255 below the highest code of int8, not below that of the row.
    exponents = -x.scale * np.arange(256).astype(np.float32)
    exponentials = np.exp(exponents.astype(np.float64)).astype(np.float32)
    highest = x.codes.max(-1, keepdims=True).astype(np.intp)
    found = exponentials[highest - x.codes]
    total = np.zeros(highest.shape, np.float32)
    for index in range(found.shape[-1]):  # One after another, as float32 sums depend on it.
        total += found[..., index : index + 1]
    scaled = found * (np.float32(1) / (total * output.scale))
    return np.floor(scaled + np.float32(0.5)).astype(np.int64) + output.zero_point


def _fixed_point_softmax(x: Codes) -> np.ndarray:
    integer_bits = 5
    factor = min(np.float64(x.scale) * 2 ** (31 - integer_bits), 2.0**31 - 1)
    multiplier, shift = fixed_point(factor)
    radius = np.floor((2**integer_bits - 1) * 2.0 ** (31 - integer_bits) / 2.0**shift)
    below = x.codes.astype(np.int64) - x.codes.max(-1, keepdims=True)
    counts = below >= -radius
    exponentials = _exp(high_product(np.where(counts, below, 0) << shift, multiplier))
    sums = np.sum(np.where(counts, divide_by_power_of_two(exponentials, 12), 0), -1, keepdims=True)
    # The sum as 2^bits * (1 + fraction), in Q12.
    _, length = np.frexp(sums.astype(np.float64))
    inverse = _one_over_one_plus((sums << (32 - length)) - 2**31)
    shifts = 12 - (32 - length) + 31 - 8
    codes = divide_by_power_of_two(high_product(inverse, exponentials), shifts)
    return np.where(counts, codes, 0) + LOW


def _exp(x: np.ndarray) -> np.ndarray:
    """exp of a number in Q5 that is not positive, in Q0.

    The part above a multiple of 1/4 by a polynomial; the rest bit by bit.
    """
    quarter = 1 << 24
    rest = (x & (quarter - 1)) - quarter
    result = _exp_of_quarter(rest << 5)
    remainder = rest - x
    for bit, power in enumerate(EXPONENTIALS):
        result = np.where(remainder & (quarter << bit), high_product(result, power), result)
    return np.where(x == 0, ONE, result)


EXPONENTIALS = (1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242)
"""exp of -1/4, -1/2, -1, -2, -4, -8, -16, in Q0."""


def _exp_of_quarter(x: np.ndarray) -> np.ndarray:
    """exp on [-1/4, 0) in Q0: a Taylor polynomial of degree 4 around -1/8."""
    exp_minus_eighth, third = 1895147668, 715827883
    x = x + (1 << 28)
    square = high_product(x, x)
    cube, fourth = high_product(square, x), high_product(square, square)
    tail = high_product(divide_by_power_of_two(fourth, 2) + cube, third) + square
    tail = divide_by_power_of_two(tail, 1)
    return exp_minus_eighth + high_product(exp_minus_eighth, x + tail)


def _one_over_one_plus(x: np.ndarray) -> np.ndarray:
    """1 / (1 + x) for x from 0 to 1 in Q0: three steps of Newton's method."""
    half = (x + ONE + 1) >> 1
    result = 1515870810 + high_product(half, -1010580540)  # 48/17 - 32/17 half, in Q2.
    for _ in range(3):
        error = (1 << 29) - high_product(half, result)
        result = result + _saturate(high_product(result, error) << 2)
    return _saturate(result << 1)


def _saturate(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -(2**31), 2**31 - 1)
