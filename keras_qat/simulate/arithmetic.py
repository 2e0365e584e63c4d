"""How integer kernels multiply by a real number: TFLite's way and XNNPACK's.

TFLite's kernels (and those for microcontrollers) hold the number as a 31-bit integer and a shift,
and round twice. XNNPACK multiplies in float32 and rounds once, halves to the even neighbour;
where speed asks for it, with small integer multipliers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "divide_by_power_of_two",
    "fixed_point",
    "inverse_square_root",
    "multiply",
    "multiply_sums",
    "requantize",
]


def fixed_point(number: Any) -> tuple[np.ndarray, np.ndarray]:
    """A positive real number as a multiplier of 31 bits and a power of two.

    Args:
        number: float64, a scalar or an array.

    Returns:
        `multiplier` (int64, 2^30 to 2^31 - 1) and `exponent`, with
        number = multiplier / 2^31 * 2^exponent, up to rounding.
    """
    fraction, exponent = np.frexp(np.asarray(number, np.float64))
    multiplier = np.floor(fraction * 2.0**31 + 0.5).astype(np.int64)
    carried = multiplier == 2**31
    multiplier = np.where(carried, multiplier // 2, multiplier)
    exponent = exponent + carried
    lost = exponent < -31
    return np.where(lost, 0, multiplier), np.where(lost, 0, exponent)


def multiply(x: Any, multiplier: Any, exponent: Any, halves_up: Any = False) -> np.ndarray:
    """Whole numbers times a `fixed_point` number, rounded as TFLite's kernels do.

    Args:
        x: whole numbers.
        multiplier, exponent: the number; scalars or one for each entry of the last axis.
        halves_up: where the second rounding moves halves up instead of away from zero, as it
            does in optimized kernels.
    """
    shifted = np.asarray(x, np.int64) << np.maximum(exponent, 0)
    product = high_product(shifted, multiplier)
    shift = np.maximum(-np.asarray(exponent), 0)
    away = divide_by_power_of_two(product, shift)
    if not np.any(halves_up):
        return away
    return np.where(halves_up, (product + ((1 << shift) >> 1)) >> shift, away)


def multiply_sums(x: Any, multiplier: Any, exponent: Any) -> np.ndarray:
    """64-bit sums of int16 kernels times the upper 15 bits of a `fixed_point` multiplier."""
    reduced = np.minimum((np.asarray(multiplier) + 2**15) >> 16, 2**15 - 1)
    shift = 15 - np.asarray(exponent, np.int64)
    return (np.asarray(x, np.int64) * reduced + (1 << (shift - 1))) >> shift


def high_product(a: Any, b: Any, bits: int = 32) -> np.ndarray:
    """Twice the upper half of a product of two `bits`-wide integers, rounded to nearest."""
    return (np.asarray(a, np.int64) * b + (1 << (bits - 2))) >> (bits - 1)


def divide_by_power_of_two(x: np.ndarray, exponent: Any) -> np.ndarray:
    """x / 2^exponent, rounded to nearest, halves away from zero."""
    half = (1 << np.asarray(exponent, np.int64)) >> 1
    return (x + half - ((x < 0) & (half > 0))) >> exponent


def requantize(kernels: str, sums: np.ndarray, ratio: Any) -> np.ndarray:
    """Sums of products in steps of the output.

    Args:
        kernels: the family of kernels.
        sums: whole numbers.
        ratio: the step of a product over that of the output, a scalar or one for each entry of
            the last axis: float32 or float64, as the kernel computes it.

    Returns:
        Whole numbers, the zero point not yet added.
    """
    if kernels == "xnnpack":
        return np.rint(sums.astype(np.float32) * np.float32(ratio)).astype(np.int64)
    return multiply(sums, *fixed_point(ratio))


def inverse_square_root(number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1 / sqrt of whole numbers below 2^31 as `fixed_point` gives it: five steps of Newton's."""
    _, exponent = np.frexp(number.astype(np.float64))  # The number of bits.
    pairs = exponent.astype(np.int64) // 2
    scaled = number << 2 * np.maximum(14 - pairs, 0) >> 2 * np.maximum(pairs - 14, 0)
    half = ((scaled >> 1) + 1) >> 1
    x = np.full(number.shape, 2**28)  # 1, with 3 bits in front of the point.
    for _ in range(5):
        cube = high_product(high_product(x, x), x) << 6
        x = (high_product(3 * 2**27, x) - high_product(half, cube)) << 3
    multiplier = high_product(x, 1518500250) << np.maximum(3 - pairs, 0)
    tiny = number <= 1
    return np.where(tiny, 2**31 - 1, multiplier), np.where(tiny, 0, np.minimum(3 - pairs, 0))
