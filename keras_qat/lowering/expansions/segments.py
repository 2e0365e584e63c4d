"""Expands sums, means and extrema of rows by constant segments, as graph networks use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import read_array, read_scalar
from keras_qat.lowering.expand_call import CannotExpand, Expansion, require


def _read_segments(segment_ids: tf.Tensor, num_segments: Any) -> tuple[np.ndarray, int]:
    """Return the segment of each row, and the number of segments."""
    ids = read_array(segment_ids)
    if ids is None or ids.ndim != 1 or not ids.size:
        raise CannotExpand
    count = ids.max() + 1 if num_segments is None else read_scalar(num_segments)
    if count is None:
        raise CannotExpand
    return ids, int(count)


def _sum_segments(power: float) -> Callable[..., Any]:
    """Return a sum over segments, divided by a power of their numbers of rows.

    It is a product with a matrix that has a column for each segment.
    """

    def total(data: tf.Tensor, segment_ids: tf.Tensor, num_segments: Any = None) -> tf.Tensor:
        ids, count = _read_segments(segment_ids, num_segments)
        sizes = data.shape[1:]
        require(None not in sizes)
        members = np.asarray(ids[:, None] == np.arange(count), np.float32)
        members /= np.maximum(members.sum(0), 1.0) ** power
        rows = data if len(sizes) == 1 else tf.reshape(data, [len(ids), int(np.prod(sizes))])
        sums = tf.transpose(tf.matmul(tf.transpose(rows), members))
        return sums if len(sizes) == 1 else tf.reshape(sums, [count, *sizes])

    return total


def _reduce_segments(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return an extremum over segments, of equally many rows: some of them are repeated."""

    def extremum(data: tf.Tensor, segment_ids: tf.Tensor, num_segments: Any = None) -> tf.Tensor:
        ids, count = _read_segments(segment_ids, num_segments)
        members = [np.flatnonzero(ids == segment) for segment in range(count)]
        require(all(map(len, members)))
        most = max(map(len, members))
        table = np.stack([np.resize(rows, most) for rows in members])
        return reduce(tf.gather(data, table), axis=1)

    return extremum


def _repeat(input: tf.Tensor, repeats: Any, axis: Any = None) -> tf.Tensor:
    """Repeats each row as often as a constant says."""
    counts = read_array(repeats)
    axis = 0 if axis is None and len(input.shape) == 1 else axis
    if counts is None or counts.ndim != 1 or not isinstance(axis, int):
        raise CannotExpand
    require(input.shape[axis] == len(counts))
    return tf.gather(input, np.repeat(np.arange(len(counts)), counts), axis=axis)


EARLY: dict[str, Expansion] = {
    "unsorted_segment_sum": _sum_segments(0.0),
    "unsorted_segment_mean": _sum_segments(1.0),
    "unsorted_segment_sqrt_n": _sum_segments(0.5),
    "unsorted_segment_max": _reduce_segments(tf.reduce_max),
    "unsorted_segment_min": _reduce_segments(tf.reduce_min),
    "segment_sum": _sum_segments(0.0),
    "segment_mean": _sum_segments(1.0),
    "segment_max": _reduce_segments(tf.reduce_max),
    "segment_min": _reduce_segments(tf.reduce_min),
    "repeat": _repeat,
}
