"""Weights of 4 bits, two in a byte."""

from __future__ import annotations

import numpy as np

__all__ = ["packed"]

HIGHEST = 7
"""The largest quantized value of a weight of 4 bits; the lowest one, -8, is left out."""


def packed(q: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Quantized weights in 4 bits, if they fit without a change.

    Weights trained with few bits have a common divisor in each channel, as their scales were made
    that many times finer. Divided by it they are small.

    Args:
        q: int8.
        axis: of the channels, None for one scale for all.

    Returns:
        The bytes, the first of two values in the lower half, and the divisors, one for each channel
        or a single one; or None.
    """
    others = tuple(each for each in range(q.ndim) if each != axis)
    divisors = np.maximum(np.gcd.reduce(q.astype(np.int32), axis=others, keepdims=True), 1)
    small = q // divisors
    if np.max(np.abs(small), initial=0) > HIGHEST:
        return None
    halves = (small.reshape(-1) & 15).astype(np.uint8)
    halves = np.append(halves, np.zeros(halves.size % 2, np.uint8))
    return halves[0::2] | halves[1::2] << 4, divisors.reshape(-1)
