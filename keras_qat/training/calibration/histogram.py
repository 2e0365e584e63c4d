"""Histograms of tensors, and calibration methods that choose a range from a histogram.

A bin counts all float32 values with the same sign, exponent and first 9 bits of the mantissa. For
example, one bin is from 1 to 1 + 1/512. The bins do not depend on the extremes of a tensor, so one
pass over the data is enough.

A calibration method is a function of a histogram and a `QuantSpec`. It returns the minimum and the
maximum of the range. A smaller range clips more values, but quantizes the others in finer steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import Switch, trace_once
from keras_qat.config.specs import QuantSpec
from keras_qat.training.fake_quantization.phase import Flag

_SHIFT = 14
"""Number of low bits of a float32 that are dropped. The remaining bits are the index of the bin."""
_ALL = 1 << (32 - _SHIFT)
"""Number of bins in the result of `count_bins`."""
_SIDE = 1 << 15
"""Number of bins for each sign after `sort_bins`: 512 for each power of 2 from 2^-32 to 2^31."""
_FIRST = (127 - 32) << (23 - _SHIFT)
"""Index of the bin that begins at 2^-32. `sort_bins` merges the bins below, from 0 to 2^-32."""
_STARTS = np.array([0, *range(_FIRST, _FIRST + _SIDE - 1)])
"""The first bin of `count_bins` in each bin of `sort_bins`."""
_INFINITY = 0x7F800000 >> _SHIFT
"""The bin of infinity. Later bins are NaN."""
_GOLDEN = (5**0.5 - 1) / 2
_ENOUGH = 1 << 14
"""Maximum number of counted values per example. Of larger examples, every n-th value is used."""


def find_extremes(x: tf.Tensor) -> Any:
    """Returns the smallest and the largest value. Returns NaN if any value is NaN or infinite."""
    extremes = tf.stack([tf.reduce_min(x), tf.reduce_max(x)])
    is_finite = tf.reduce_all(tf.math.is_finite(x))
    return tf.where(is_finite, extremes, np.nan)


def count_bins(x: tf.Tensor) -> Any:
    """Counts the values of a batch in each bin. `sort_bins` then sorts the counts.

    At most `_ENOUGH` values of each example are counted.
    """
    bits = tf.bitwise.right_shift(tf.bitcast(take_sample(x, _ENOUGH), tf.uint32), _SHIFT)
    return tf.math.bincount(tf.cast(bits, tf.int32), minlength=_ALL, maxlength=_ALL)


def take_sample(x: tf.Tensor, most: int) -> Any:
    """Returns a vector with every n-th value of `x`, at most `most` values per example."""
    size = math.prod(x.shape[1:]) if x.shape[1:].is_fully_defined() else 0
    step = -(-size // most) or 1
    while step > 1 and math.gcd(step, x.shape[-1]) > 1:  # This stride would skip some channels.
        step += 1
    return _stride(tf.cast(x, tf.float32), size if step > 1 else 1, step)


@partial(trace_once, signature=[tf.TensorSpec(None), *[tf.TensorSpec([], tf.int32)] * 2])
def _stride(x: tf.Tensor, size: Any, step: tf.Tensor) -> Any:
    """Return a vector with every `step`-th value of each example. An example has `size` values."""
    return tf.reshape(tf.reshape(x, [-1, size])[:, ::step], [-1])


@partial(trace_once, signature=[tf.TensorSpec(None), tf.TensorSpec([], tf.int32)])
def extremes_and_sample(x: tf.Tensor, most: Any) -> Any:
    """Returns a vector with the extremes of `x`, followed by at most `most` sampled values.

    TensorFlow traces this function only once, for tensors of all shapes.
    """
    values = tf.reshape(x, [-1])
    size = tf.size(values)
    indices = tf.range(tf.minimum(size, most))
    # Multiples of the golden ratio are evenly spread, and include all channels.
    positions = tf.math.floormod(tf.cast(indices, tf.float64) * _GOLDEN, 1.0)
    spread = tf.cast(positions * tf.cast(size, tf.float64), tf.int32)
    sample = tf.gather(values, tf.where(size <= most, indices, spread))
    return tf.concat([find_extremes(x), sample], 0)


def sort_bins(counts: np.ndarray) -> np.ndarray:
    """Sorts the result of `count_bins` by value. The outer bins also count larger magnitudes."""
    sides = counts.reshape(2, -1)[:, :_INFINITY].astype(np.int64)
    positive, negative = np.add.reduceat(sides, _STARTS, axis=1)
    return np.concatenate([negative[::-1], positive])


_BITS = (np.arange(_SIDE, dtype=np.uint32) + np.uint32(_FIRST)) << np.uint32(_SHIFT)
_SIZES = np.append(_BITS.view(np.float32)[:-1].astype(np.float64), np.inf)
EDGES = np.concatenate([-_SIZES[::-1], [0.0], _SIZES])


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A histogram without empty bins.

    Args:
        bins: indices of the bins, in order.
        low, high: the lower and upper edges of the bins.
        counts: number of values in each bin.
    """

    bins: np.ndarray
    low: np.ndarray
    high: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray, minimum: float, maximum: float) -> Histogram:
        """Creates a histogram from the result of `sort_bins` and the exact extremes."""
        (bins,) = np.nonzero(counts)
        low, high = (np.clip(EDGES[bins + end], minimum, maximum) for end in (0, 1))
        return cls(bins, low, high, counts[bins].astype(np.float64))

    def merge(self, number: int) -> Histogram:
        bins = self.bins // number
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        ends = np.append(starts[1:], len(bins)) - 1
        counts = np.add.reduceat(self.counts, starts)
        return Histogram(bins[starts], self.low[starts], self.high[ends], counts)

    def quantile(self, share: float) -> float:
        """Returns a quantile of the values. For example, `share=0.5` returns the median."""
        sums = np.cumsum(self.counts)
        count = share * sums[-1]
        index = min(int(np.searchsorted(sums, count)), len(sums) - 1)
        within = 1.0 - (sums[index] - count) / self.counts[index]
        low, high = self.low[index], self.high[index]
        return float(low + within * (high - low))


@dataclasses.dataclass
class Tally:
    """Statistics of a tensor, or of all tensors that share a range, over many batches.

    Args:
        low, high: the smallest and the largest value so far.
        counts: number of values in each bin. The method "minmax" has no bins, and leaves 0 here.
    """

    low: float = np.inf
    high: float = -np.inf
    counts: Any = 0

    def add(self, extremes: np.ndarray, counts: Flag | Switch) -> None:
        self.low, self.high = min(self.low, extremes[0]), max(self.high, extremes[1])
        self.counts = self.counts + counts

    def histogram(self) -> Histogram:
        return Histogram.of(self.counts, self.low, self.high)


Method = Literal["minmax", "percentile", "mse"]

Range = tuple[float, float]

_GAIN = 0.98
"""`least_squares` only clips values if this reduces the estimated error by at least 2 %. For values
with equal steps, such as pixels, the error of the full range is estimated too high."""
_MERGED = 16
"""Number of adjacent bins that `least_squares` merges, to be faster."""
_FACTORS = 2.0 ** (-np.arange(0, 48) / 4)
"""`least_squares` first tries the full range times each of these factors, 1 to 2^-11.75."""
_CLOSER = 2.0 ** (np.arange(-7, 8) / 32)
"""`least_squares` then tries the best range so far times each of these factors."""


def extremes(histogram: Histogram, spec: QuantSpec) -> Range:
    """Returns the smallest range that contains all values and zero."""
    return min(0.0, float(histogram.low[0])), max(0.0, float(histogram.high[-1]))


def percentile(histogram: Histogram, spec: QuantSpec, percent: float = 99.99) -> Range:
    """Returns the range that excludes `100 - percent` percent of the values at each end."""
    share = percent / 100
    low = min(0.0, histogram.quantile(1 - share))
    return low, max(0.0, histogram.quantile(share))


def least_squares(histogram: Histogram, spec: QuantSpec) -> Range:
    """Returns the range with the smallest mean squared quantization error."""
    error = functools.partial(compute_squared_error, histogram.merge(_MERGED), spec)
    full = best = np.array(_full_range(histogram, spec))
    # Move the lower and the upper end in turn. In symmetric ranges, move both ends together.
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
    """Return the range of all values and zero, symmetric around zero if `spec` is symmetric."""
    low, high = extremes(histogram, spec)
    return (min(low, -high), max(high, -low)) if spec.symmetric else (low, high)


def compute_squared_error(histogram: Histogram, spec: QuantSpec, ends: Range | np.ndarray) -> float:
    """Returns the sum of squared errors if all values are quantized to the range `ends`."""
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
    points = widths <= 0  # A single value, such as the maximum.
    density = histogram.counts / np.where(points, 1.0, widths)
    total = np.sum((density * (inside + (above + below) / 3))[~points])
    if points.any():
        x = a[points]
        error = np.round(np.clip(x, low, high) / scale) * scale - x
        total += np.sum(histogram.counts[points] * error**2)
    return float(total)


def _rounding(x: np.ndarray) -> np.ndarray:
    """Integrate the squared rounding error, `(t - round(t))**2`, from t = 0 to t = x."""
    nearest = np.round(x)
    return nearest / 12 + (x - nearest) ** 3 / 3


METHODS: dict[Method, Callable[..., Range]] = {
    "minmax": extremes,
    "percentile": percentile,
    "mse": least_squares,
}
