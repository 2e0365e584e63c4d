"""Expands `tf.gather_nd`, repeats, and reductions of rows by constant segments to `tf.gather`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import get_kind, get_operands, read_array, read_scalar
from keras_qat.graph.sizes import is_example_index
from keras_qat.lowering.expand_call import (
    CannotExpand,
    Expansion,
    get_value,
    is_tensor,
    make_symbol,
    require,
)


def _gather_nd(params: tf.Tensor, indices: tf.Tensor, batch_dims: Any = 0) -> tf.Tensor:
    """Gather within each example.

    The first of the indices counts the examples if `batch_dims` is 0, as in
    `tf.gather_nd(images, tf.stack([examples, rows, columns], -1))`.
    """
    require(is_tensor(params) and is_tensor(indices) and read_scalar(batch_dims) in (0, 1))
    columns = _list_columns(indices)
    if read_scalar(batch_dims) == 0:
        require(is_example_index(get_value(columns.pop(0))))
    sizes, rest = params.shape[1 : len(columns) + 1], params.shape[len(columns) + 1 :]
    require(columns and None not in (*sizes, *rest))
    index, *others = columns
    for axis, (size, column) in enumerate(zip(sizes[1:], others, strict=True), 1):
        index = tf.multiply(index, size, name=f"row_{axis}")
        index = tf.add(index, column, name=f"sum_{axis}")
    if others:
        params = tf.reshape(params, [-1, math.prod(sizes), *rest], name="flat")
    return tf.gather(params, index, axis=1, batch_dims=1)


def _list_columns(indices: tf.Tensor) -> list[Any]:
    """Return the tensors that were stacked along the last axis, or the entries along it."""
    value, last, count = get_value(indices), len(indices.shape) - 1, indices.shape[-1]
    call = value.producer
    if call is not None and get_kind(call) == "stack":
        values, axis = get_operands(call, "values", "axis")
        if axis in (-1, last) and len(call.inputs) == count:
            return list(map(make_symbol, values))
    return [
        tf.gather(indices, index, axis=last, name=f"column_{index}") for index in range(count or 0)
    ]


OPERATIONS: dict[str, Expansion] = {
    "gather_nd": _gather_nd,
}


def _read_segments(segment_ids: tf.Tensor, num_segments: int | None) -> tuple[np.ndarray, int]:
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

    def sum_segments(
        data: tf.Tensor, segment_ids: tf.Tensor, num_segments: int | None = None
    ) -> tf.Tensor:
        ids, count = _read_segments(segment_ids, num_segments)
        sizes = data.shape[1:]
        require(None not in sizes)
        members = np.asarray(ids[:, None] == np.arange(count), np.float32)
        members /= np.maximum(members.sum(0), 1.0) ** power
        rows = data if len(sizes) == 1 else tf.reshape(data, [len(ids), int(np.prod(sizes))])
        sums = tf.transpose(tf.matmul(tf.transpose(rows), members))
        return sums if len(sizes) == 1 else tf.reshape(sums, [count, *sizes])

    return sum_segments


def _reduce_segments(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return an extremum over segments. Rows are repeated until all segments are equally long."""

    def reduce_segments(
        data: tf.Tensor, segment_ids: tf.Tensor, num_segments: int | None = None
    ) -> tf.Tensor:
        ids, count = _read_segments(segment_ids, num_segments)
        members = [np.flatnonzero(ids == segment) for segment in range(count)]
        require(all(map(len, members)))
        most = max(map(len, members))
        table = np.stack([np.resize(rows, most) for rows in members])
        return reduce(tf.gather(data, table), axis=1)

    return reduce_segments


def _repeat(input: tf.Tensor, repeats: Any, axis: Any = None) -> tf.Tensor:
    """Repeat each row by a constant count."""
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
