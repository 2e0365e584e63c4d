"""Expands `tf.gather_nd` and repeats to `tf.gather`."""

from __future__ import annotations

import math
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


def _repeat(input: tf.Tensor, repeats: Any, axis: Any = None) -> tf.Tensor:
    """Repeat each row by a constant count."""
    counts = read_array(repeats)
    axis = 0 if axis is None and len(input.shape) == 1 else axis
    if counts is None or counts.ndim != 1 or not isinstance(axis, int):
        raise CannotExpand
    require(input.shape[axis] == len(counts))
    return tf.gather(input, np.repeat(np.arange(len(counts)), counts), axis=axis)


EARLY: dict[str, Expansion] = {"repeat": _repeat}

OPERATIONS: dict[str, Expansion] = {"gather_nd": _gather_nd}
