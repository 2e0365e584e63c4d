"""Histograms of tensors that need not know their range beforehand.

A bin is as wide as 1/512 to 1/1024 of the numbers in it, from 2^-32 on: a float's sign and exponent
and the first 9 bits behind them. So all data take one pass, in any order and in batches of
any size, and neither outliers nor a change of scale cost resolution.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import traced_once

__all__ = ["Histogram", "counts_of", "extremes_of", "folded"]

_SHIFT = 14
"""Bits of a float32 behind those that tell its bin."""
_ALL = 1 << (32 - _SHIFT)
_SIDE = 1 << 15
"""Bins of either sign: 512 for each power of 2, for 64 of them."""
_FIRST = (127 - 32) << (23 - _SHIFT)
"""The first bits of 2^-32. What is smaller lies in the first bin of its sign."""
_ENOUGH = 1 << 14
"""How many numbers of an example are counted, evenly spread over it."""


def extremes_of(x: Any) -> Any:
    """The smallest and the largest number of a tensor, NaN if one is not finite."""
    return _extremes(tf.cast(x, tf.float32))


@partial(traced_once, signature=[tf.TensorSpec(None)])
def _extremes(x: Any) -> Any:
    ends = tf.stack([tf.reduce_min(x), tf.reduce_max(x)])
    known = tf.reduce_all(tf.math.is_finite(x))
    return tf.where(known, ends, np.nan)


def counts_of(x: Any) -> Any:
    """How many numbers of a batch lie in each bin, in the order of their bits: see `folded`.

    Of large examples every n-th number is counted.
    """
    size = math.prod(x.shape[1:]) if x.shape[1:].is_fully_defined() else 0
    step = -(-size // _ENOUGH) or 1
    while step > 1 and math.gcd(step, x.shape[-1]) > 1:  # Or some channels would be passed over.
        step += 1
    x = tf.cast(x, tf.float32)
    if step > 1:
        x = tf.reshape(x, [-1, size])[:, ::step]
    bits = tf.bitwise.right_shift(tf.bitcast(tf.reshape(x, [-1]), tf.uint32), _SHIFT)
    return tf.math.bincount(tf.cast(bits, tf.int32), minlength=_ALL, maxlength=_ALL)


def folded(counts: np.ndarray) -> np.ndarray:
    """Counts of `counts_of` from the lowest bin to the highest, without sizes that do not occur."""
    positive, negative = (
        np.concatenate([[side[:_FIRST].sum()], side[_FIRST : _FIRST + _SIDE - 1]])
        for side in counts.reshape(2, -1).astype(np.int64)
    )
    return np.concatenate([negative[::-1], positive])


def _edges() -> np.ndarray:
    """The ends of the bins, in order: one more than there are."""
    firsts = (np.arange(_SIDE, dtype=np.uint32) + np.uint32(_FIRST)) << np.uint32(_SHIFT)
    sizes = firsts.view(np.float32).astype(np.float64)
    return np.concatenate([-sizes[::-1], [0.0], sizes])


EDGES = _edges()


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How many numbers lie between some edges, in the bins that hold any.

    Args:
        places: numbers of the bins, in order.
        low: their lower edges.
        high: their upper edges.
        counts: how many numbers there are in each.
    """

    places: np.ndarray
    low: np.ndarray
    high: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray, minimum: float, maximum: float) -> Histogram:
        """That of the counts of all bins. The extremes are known exactly."""
        (there,) = np.nonzero(counts)
        low, high = (np.clip(EDGES[there + end], minimum, maximum) for end in (0, 1))
        return cls(there, low, high, counts[there].astype(np.float64))

    def merged(self, number: int) -> Histogram:
        """The same with bins that are so many times as wide."""
        places = self.places // number
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        ends = np.append(starts[1:], len(places)) - 1
        counts = np.add.reduceat(self.counts, starts)
        return Histogram(places[starts], self.low[starts], self.high[ends], counts)

    def without_zeros(self) -> Histogram:
        """The same without what is zero or next to it."""
        some = (self.places != _SIDE) & (self.places != _SIDE - 1)
        arrays = (self.places, self.low, self.high, self.counts)
        return Histogram(*(each[some] for each in arrays))

    @property
    def size(self) -> float:
        """How many numbers there are."""
        return float(self.counts.sum())

    @property
    def energy(self) -> float:
        """The sum of the squares of the numbers, evenly spread within a bin."""
        squares = (self.low**2 + self.low * self.high + self.high**2) / 3
        return float(np.sum(self.counts * squares))

    def below(self, values: np.ndarray) -> np.ndarray:
        """How many numbers lie below each of some values: evenly spread within a bin."""
        sums = np.concatenate([[0.0], np.cumsum(self.counts)])
        # Bins lie apart: sums stay as they are in between.
        ends = np.stack([self.low, self.high], 1).reshape(-1)
        return np.interp(values, ends, np.stack([sums[:-1], sums[1:]], 1).reshape(-1))

    def quantile(self, share: float) -> float:
        """The number below which so large a share of the numbers lies."""
        sums = np.cumsum(self.counts)
        wanted = share * sums[-1]
        place = min(int(np.searchsorted(sums, wanted)), len(sums) - 1)
        within = 1.0 - (sums[place] - wanted) / self.counts[place]
        low, high = self.low[place], self.high[place]
        return float(low + within * (high - low))
