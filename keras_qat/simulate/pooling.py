"""Averages, means and resized images of codes."""

from __future__ import annotations

import numpy as np

from keras_qat.simulate.arithmetic import fixed_point, multiply
from keras_qat.simulate.codes import Codes, Grid

__all__ = ["average", "mean", "resize"]


def average(averages: np.ndarray) -> np.ndarray:
    """Average pooling: from averages of codes in float64, halves away from code zero.

    XNNPACK does not take it.
    """
    # Halves are off by far less than the distance to the next quotient of whole numbers.
    return (np.sign(averages) * np.floor(np.abs(averages) + 0.5 + 1e-9)).astype(np.int64)


def mean(kernels: str, x: Codes, means: np.ndarray, output: Grid) -> np.ndarray:
    """Means over several axes, from those of the codes in float64."""
    count = x.codes.size // max(means.size, 1)
    sums = np.rint(means * count).astype(np.int64)
    if kernels == "xnnpack":
        factor = x.scale / output.scale * (np.float32(1) / np.float32(count))
        offset = np.float32(output.zero_point) - np.float32(count * x.zero_point) * factor
        return np.rint(sums.astype(np.float32) * factor + offset).astype(np.int64)
    multiplier, exponent = fixed_point(np.float64(x.scale) / np.float64(output.scale))
    shift = min(count.bit_length() - 1, 32, 31 + int(exponent))
    multiplier = (multiplier << shift) // count
    return multiply(sums - x.zero_point * count, multiplier, exponent - shift) + output.zero_point


def resize(kernels: str, x: Codes, height: int, width: int) -> np.ndarray:
    """Bilinear interpolation between pixel centres, in the input's grid."""
    bits = 11 if kernels == "xnnpack" else 10
    positions = _xnnpack_positions if kernels == "xnnpack" else _reference_positions
    codes = x.codes.astype(np.int64)
    for axis, size in ((1, height), (2, width)):
        low, high, share = positions(codes.shape[axis], size)
        share = share.reshape([-1 if each == axis else 1 for each in range(4)])
        first, second = np.take(codes, low, axis), np.take(codes, high, axis)
        codes = first * (2**bits - share) + second * share
    half = 1 << (2 * bits - 1)
    if kernels == "xnnpack":
        return (codes + half) >> (2 * bits)
    return np.sign(codes) * ((np.abs(codes) + half) >> (2 * bits))


def _xnnpack_positions(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per output pixel the two input pixels, and the share of the second in 2048ths."""
    scale = np.float32(old) / np.float32(new)
    offset = np.float32(0.5) * scale - np.float32(0.5)
    place = np.arange(new, dtype=np.float32) * scale + offset
    place = np.clip(place, np.float32(0), np.float32(old - 1))
    low = place.astype(np.int64)
    share = np.rint((place - low.astype(np.float32)) * np.float32(2**11)).astype(np.int64)
    return low, np.minimum(low + 1, old - 1), share


def _reference_positions(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same in 1024ths, all in integers."""
    scale = ((old << 10) + new // 2) // new
    place = np.arange(new) * scale + scale // 2 - (1 << 9)
    low = np.maximum(np.trunc(place / 1024).astype(np.int64), 0)
    high = np.minimum((place + 1023) // 1024, old - 1)
    return low, high, place - (low << 10)
