"""Calibration methods: functions that choose the range of a quantizer from a histogram.

A method takes a histogram and a specification and returns the ends of the range. Values beyond
the ends are clipped, which leaves a finer scale for the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import numpy as np

from keras_qat.config.specs import QuantSpec
from keras_qat.training.calibration.histogram import Histogram

Method = Literal["minmax", "percentile", "mse", "entropy"]

Range = tuple[float, float]

_GAIN = 0.98
"""A narrower range has to reduce the error to this share, as histograms overestimate the error of
the extremes for values that already lie on the grid, such as pixels."""
_MERGED = 16
"""Bins that are merged to sum errors; a merged bin is 1/32 as wide as its numbers."""
_FACTORS = 2.0 ** (-np.arange(0, 48) / 4)
"""Factors of the extremes that are tried as ends, down to 1/4096."""
_CLOSER = 2.0 ** (np.arange(-7, 8) / 32)
"""Factors that are tried around the best of `_FACTORS`."""
_PER_LEVEL = 8
"""Bins per quantization level in the distributions whose divergence is computed."""


def extremes(histogram: Histogram, spec: QuantSpec) -> Range:
    """Returns the smallest range that holds all values and zero."""
    return min(0.0, float(histogram.low[0])), max(0.0, float(histogram.high[-1]))


def percentile(histogram: Histogram, spec: QuantSpec, percent: float = 99.99) -> Range:
    """Returns the range that holds all values but a share at either end."""
    share = percent / 100
    low = min(0.0, histogram.quantile(1 - share))
    return low, max(0.0, histogram.quantile(share))


def least_squares(histogram: Histogram, spec: QuantSpec) -> Range:
    """Returns the range with the smallest mean squared quantization error."""
    error = functools.partial(squared_error, histogram.merged(_MERGED), spec)
    full = best = np.array(_full_range(histogram, spec))
    # The lower end is moved, then the upper one, and again; both at a time in symmetric ranges.
    moves = [(True, True)] if spec.symmetric else [(full[0] < 0, False), (False, full[1] > 0)]
    for _ in range(3):
        before = best
        for is_moved in filter(any, moves):
            best = np.where(is_moved, full, best)
            for factors in (_FACTORS, _CLOSER):
                best = min(np.where(is_moved, factors[:, None], 1.0) * best, key=error)
        if spec.symmetric or (best == before).all():
            break
    low, high = best if error(best) < _GAIN * error(full) else full
    return float(low), float(high)


def _full_range(histogram: Histogram, spec: QuantSpec) -> Range:
    """Returns the range of `extremes`, made symmetric if the specification asks for that."""
    low, high = extremes(histogram, spec)
    return (min(low, -high), max(high, -low)) if spec.symmetric else (low, high)


def squared_error(histogram: Histogram, spec: QuantSpec, ends: Range | np.ndarray) -> float:
    """Sums the squared quantization errors, assuming an even spread of values within a bin."""
    low, high = ends
    if high <= low:
        return float(np.inf)
    scale = (high - low) / (2**spec.bits - 1 - (spec.symmetric and spec.narrow_range))
    if spec.power_of_two:
        scale = 2.0 ** np.ceil(np.log2(scale))
        low, high = (sign * scale * 2 ** (spec.bits - 1) for sign in (-1, 1))
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
        error = np.round(np.clip(x, low, high) / scale) * scale - x
        total += np.sum(histogram.counts[points] * error**2)
    return float(total)


def _rounding(x: np.ndarray) -> np.ndarray:
    """Integrates the squared distance to the nearest whole number from 0 to x."""
    nearest = np.round(x)
    return nearest / 12 + (x - nearest) ** 3 / 3


def entropy(histogram: Histogram, spec: QuantSpec) -> Range:
    """Returns the range with the smallest Kullback-Leibler divergence after quantization.

    Zeros do not count, as every range holds them. With more than 8 bits the range is that of the
    extremes, as there is hardly anything to gain.

    Source: TensorRT's calibration (Migacz 2017), for ranges with an end on each side.
    """
    rest = histogram.without_zeros()
    if spec.bits > 8 or not len(rest.counts):
        return extremes(histogram, spec)
    low, high = _full_range(histogram, spec)
    ranges = [(low * factor, high * factor) for factor in 2.0 ** (-np.arange(0, 96) / 8)]
    return min(ranges, key=lambda ends: _divergence(rest, spec.bits, ends))


def _divergence(histogram: Histogram, bits: int, ends: Range) -> float:
    """Computes the divergence between the clipped histogram and its quantized version."""
    levels = 2**bits - 1
    edges = np.linspace(*ends, levels * _PER_LEVEL + 1)
    sums = histogram.below(edges)
    inside = np.diff(sums)
    if inside.sum() <= 0:
        return float(np.inf)
    clipped = inside.copy()
    clipped[0] += sums[0]
    clipped[-1] += histogram.size - sums[-1]
    is_used = (clipped > 0).reshape(levels, _PER_LEVEL)
    means = inside.reshape(levels, _PER_LEVEL).sum(1) / np.maximum(is_used.sum(1), 1)
    quantized = (is_used * means[:, None]).reshape(-1)
    clipped, quantized = clipped / clipped.sum(), quantized / quantized.sum()
    p, q = clipped[clipped > 0], quantized[clipped > 0]
    return float(np.sum(p * np.log(p / np.maximum(q, 1e-12))))


METHODS: dict[Method, Callable[..., Range]] = {
    "minmax": extremes,
    "percentile": percentile,
    "mse": least_squares,
    "entropy": entropy,
}
"""Name that `calibrate` takes -> calibration method."""
