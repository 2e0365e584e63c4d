"""Ways to take a range from a histogram: numpy, no model.

Each takes a histogram and a specification and returns the ends of the range. What lies beyond
them is cut off, so that the steps inside are smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from keras_qat.config.specs import QuantSpec
from keras_qat.training.calibration.histogram import Histogram

__all__ = [
    "METHODS",
    "Method",
    "Range",
    "entropy",
    "extremes",
    "least_squares",
    "percentile",
    "squared_error",
]

Method = Literal["minmax", "percentile", "mse", "entropy"]

Range = tuple[float, float]

_GAIN = 0.98
"""The extremes are left only for an error that is this much smaller: numbers that lie on the
steps already, as pixels do, have less error than their histogram tells."""
_MERGED = 16
"""How many bins are one where errors are summed: each is still a 32nd as wide as its numbers."""
_FACTORS = 2.0 ** (-np.arange(0, 48) / 4)
"""Ends that are tried, of the extremes: down to 1/4096."""
_CLOSER = 2.0 ** (np.arange(-7, 8) / 32)
"""What is tried around the best of these."""
_PER_LEVEL = 8
"""Bins of a level whose distributions are compared by their entropy."""


def extremes(histogram: Histogram, spec: QuantSpec) -> Range:
    """All that was seen, and zero."""
    return min(0.0, float(histogram.low[0])), max(0.0, float(histogram.high[-1]))


def percentile(histogram: Histogram, spec: QuantSpec, percent: float = 99.99) -> Range:
    """All but a share of the numbers at either end."""
    share = percent / 100
    low = min(0.0, histogram.quantile(1 - share))
    return low, max(0.0, histogram.quantile(share))


def least_squares(histogram: Histogram, spec: QuantSpec) -> Range:
    """The range with the smallest mean squared error of quantization."""
    histogram, full = histogram.merged(_MERGED), extremes(histogram, spec)
    if spec.symmetric:
        size = max(-full[0], full[1])
        full = -size, size
        best = _narrowed(histogram, spec, full, (0, 1))
    else:
        best = full
        for _ in range(3):  # An end at a time, as far as the other one lets it.
            before = best
            for side in (0, 1):
                if full[side] != 0.0:
                    best = _narrowed(histogram, spec, best, (side,), full[side])
            if best == before:
                break
    return (
        best
        if squared_error(histogram, spec, best) < _GAIN * squared_error(histogram, spec, full)
        else full
    )


def _narrowed(
    histogram: Histogram,
    spec: QuantSpec,
    ends: Range,
    sides: tuple[int, ...],
    extreme: float | None = None,
) -> Range:
    """The best range whose ends on some sides are nearer to zero."""

    def tried(start: Range, factors: np.ndarray) -> Range:
        found = [
            (start[0] * (f if 0 in sides else 1), start[1] * (f if 1 in sides else 1))
            for f in factors
        ]
        return min(found, key=lambda each: squared_error(histogram, spec, each))

    start = list(ends)
    if extreme is not None:
        start[sides[0]] = extreme
    coarse = tried((start[0], start[1]), _FACTORS)
    return tried(coarse, _CLOSER)


def squared_error(histogram: Histogram, spec: QuantSpec, ends: Range) -> float:
    """The sum of squared errors of quantization, numbers being evenly spread within a bin."""
    low, high = ends
    if high <= low:
        return float(np.inf)
    scale = (high - low) / (2**spec.bits - 1 - (spec.symmetric and spec.narrow_range))
    a, b = histogram.low, histogram.high
    inside = scale**3 * (
        _rounding(np.clip(b, low, high) / scale) - _rounding(np.clip(a, low, high) / scale)
    )
    above = np.maximum(b - high, 0) ** 3 - np.maximum(a - high, 0) ** 3
    below = np.maximum(low - a, 0) ** 3 - np.maximum(low - b, 0) ** 3
    widths = b - a
    points = widths <= 0  # A single number, such as the maximum.
    density = histogram.counts / np.where(points, 1.0, widths)
    total = np.sum((density * (inside + (above + below) / 3))[~points])
    if points.any():
        x = a[points]
        kept = np.clip(x, low, high)
        off = np.round(kept / scale) * scale - x
        total += np.sum(histogram.counts[points] * off**2)
    return float(total)


def _rounding(x: np.ndarray) -> np.ndarray:
    """The integral from 0 to x of the squared distance to the nearest whole number."""
    whole = np.round(x)
    return whole / 12 + (x - whole) ** 3 / 3


def entropy(histogram: Histogram, spec: QuantSpec) -> Range:
    """The range that keeps most of the distribution: the smallest Kullback-Leibler divergence.

    Zeros do not count, as every range has them. With more than 8 bits there is hardly anything
    to lose: the extremes.

    Source: TensorRT's calibration (Migacz 2017), for ranges with an end on each side.
    """
    full = extremes(histogram, spec)
    rest = histogram.without_zeros()
    if spec.bits > 8 or not len(rest.counts):
        return full
    if spec.symmetric:
        size = max(-full[0], full[1])
        full = -size, size
    factors = 2.0 ** (-np.arange(0, 96) / 8)
    tried = [(full[0] * f, full[1] * f) for f in factors]
    return min(tried, key=lambda each: _divergence(rest, spec.bits, each))


def _divergence(histogram: Histogram, bits: int, ends: Range) -> float:
    """That of the numbers, cut off at the ends, from what is left of them in so many levels."""
    levels = 2**bits - 1
    edges = np.linspace(*ends, levels * _PER_LEVEL + 1)
    sums = histogram.below(edges)
    inside = np.diff(sums)
    if inside.sum() <= 0:
        return float(np.inf)
    wanted = inside.copy()
    wanted[0] += sums[0]
    wanted[-1] += histogram.size - sums[-1]
    there = (wanted > 0).reshape(levels, _PER_LEVEL)
    counts = np.maximum(there.sum(1), 1)
    means = inside.reshape(levels, _PER_LEVEL).sum(1) / counts
    left = (there * means[:, None]).reshape(-1)
    wanted, left = wanted / wanted.sum(), left / left.sum()
    some = wanted > 0
    return float(np.sum(wanted[some] * np.log(wanted[some] / np.maximum(left[some], 1e-12))))


METHODS: dict[Method, Callable[..., Range]] = {
    "minmax": extremes,
    "percentile": percentile,
    "mse": least_squares,
    "entropy": entropy,
}
"""Name, as `calibrate` takes it -> the function."""
