"""Expands slices, reshapes, rolls, sorts and gathers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import get_kind, get_operands, read_array, read_scalar
from keras_qat.graph.sizes import BATCH, find_example, find_sizes, is_example_index
from keras_qat.helper_layers.operations import Roll
from keras_qat.lowering.expand_call import (
    CannotExpand,
    Expansion,
    get_call,
    get_value,
    is_tensor,
    make_symbol,
    require,
    unwrap,
)
from keras_qat.lowering.read_operations import HIDES
from keras_qat.ops.slicing import SLICE, items_for_axes


def _gather_nd(params: tf.Tensor, indices: tf.Tensor, batch_dims: Any = 0) -> tf.Tensor:
    """Expand `tf.gather_nd` to a `tf.gather` that treats each example separately.

    If `batch_dims` is 0, the first column must be the number of the example, as in
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
    """Split `indices` along the last axis. If it is `tf.stack([x, y], -1)`, return `x` and `y`."""
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
    """Expand `tf.repeat` with a constant list of counts to a `tf.gather`."""
    counts = read_array(repeats)
    axis = 0 if axis is None and len(input.shape) == 1 else axis
    if counts is None or counts.ndim != 1 or not isinstance(axis, int):
        raise CannotExpand
    require(input.shape[axis] == len(counts))
    return tf.gather(input, np.repeat(np.arange(len(counts)), counts), axis=axis)


def slice_axis(x: tf.Tensor, axis: int, begin: int, end: int, name: str) -> tf.Tensor:
    begins, sizes = [0] * len(x.shape), [-1] * len(x.shape)
    begins[axis], sizes[axis] = begin, end - begin
    return tf.slice(x, begins, sizes, name=name)


def _getitem(tensor: tf.Tensor, slice_spec: Any) -> tf.Tensor:
    if sum(item is Ellipsis for item in tf.nest.flatten(slice_spec)) == 1:
        # Configurations of layers cannot contain an Ellipsis.
        items = items_for_axes(slice_spec, len(tensor.shape))
        return tf.__operators__.getitem(tensor, tuple(items))
    call = get_call(tensor)
    ranges = SLICE.attributes(call)["parts"]
    require(len(call.inputs) == 1 and ranges)
    # Keras does not infer the shape of `sizes[::-1]` if a size is unknown.
    is_vector = len(tensor.shape) == len(call.output.shape) == 1
    require(is_vector and not tensor.dtype.is_floating and ranges == ((None, None, -1),))
    return tf.reverse(tensor, [0])


def _strided_slice(input_: tf.Tensor, begin: Any, end: Any, strides: Any = ()) -> tf.Tensor:
    """Expand `tf.strided_slice` to `tf.slice` if it keeps all examples, and has steps of 1."""
    require(not any(map(is_tensor, (begin, end, strides))))
    ends = (*begin, *end[1:], *strides)
    require(all(isinstance(number, int) for number in ends) and not begin[0])
    require({*strides} <= {1})
    require(find_sizes([get_value(end[0])]) == [BATCH])
    require(None not in input_.shape[1 : len(begin)])
    entries = [
        range(size)[low:high]
        for size, low, high in zip(input_.shape[1:], begin[1:], end[1:], strict=False)
    ]
    left = len(input_.shape) - len(begin)
    begins = [0, *(part.start for part in entries), *[0] * left]
    return tf.slice(input_, begins, [-1, *map(len, entries), *[-1] * left])


def _reshape(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    """Expand `tf.reshape(x, [tf.shape(x)[0], 4])` to `tf.reshape(x, [-1, 4])`."""
    require(any(map(is_tensor, tf.nest.flatten(shape))) and is_tensor(tensor))
    sizes = get_call(tensor).output.shape[1:]
    require(None not in sizes)
    return tf.reshape(tensor, [-1, *sizes])


def _roll(input: tf.Tensor, shift: Any, axis: Any) -> tf.Tensor:
    shifts, axes = tf.nest.flatten(shift), tf.nest.flatten(axis)
    require(all(isinstance(number, int) for number in [*shifts, *axes]))
    return Roll(shifts, axes)(input)


def _sort(values: tf.Tensor, axis: Any = -1, direction: str = "ASCENDING") -> tf.Tensor:
    rank, size = len(values.shape), values.shape[-1]
    require(axis in (None, -1, rank - 1) and size is not None and rank > 1)
    require(values.dtype.is_floating)
    largest, _ = tf.math.top_k(values, size, name="largest")
    return largest if direction == "DESCENDING" else tf.reverse(largest, [rank - 1])


def _softmax_of_stack(logits: tf.Tensor, axis: Any = None) -> tf.Tensor:
    """Expand a softmax along axis 0 to a softmax along the last axis, between two transposes."""
    require(axis == 0 and logits.shape[0] is not None)
    order = [*range(1, len(logits.shape)), 0]
    return tf.transpose(tf.nn.softmax(tf.transpose(logits, order)), np.argsort(order).tolist())


def _flatten(x: tf.Tensor) -> tf.Tensor:
    require(None not in x.shape[1:])
    return tf.reshape(x, [-1, math.prod(x.shape[1:])])


def _normalize_axes(x: tf.Tensor, axis: Any = None, epsilon: float = 1e-12) -> tf.Tensor:
    rank, shape = len(x.shape), list(x.shape[1:])
    axes = sorted(a % rank for a in tf.nest.flatten(axis) if isinstance(a, int))
    require(len(axes) > 1 and axes == list(range(axes[0], rank)) and None not in shape)
    kept = shape[: axes[0] - 1]
    flat = tf.reshape(x, [-1, *kept, math.prod(shape[axes[0] - 1 :])])
    return tf.reshape(tf.math.l2_normalize(flat, -1, epsilon), [-1, *shape])


def _sequence_mask(lengths: tf.Tensor, maxlen: Any = None, dtype: tf.DType = tf.bool) -> tf.Tensor:
    require(read_scalar(maxlen) is not None)
    return tf.cast(tf.range(int(maxlen)) < tf.cast(lengths, tf.int32)[..., tf.newaxis], dtype)


def _argsort(values: tf.Tensor, axis: Any = -1, direction: str = "ASCENDING") -> tf.Tensor:
    require(axis in (-1, len(values.shape) - 1) and values.shape[-1] is not None)
    values = values if direction == "DESCENDING" else -values
    return tf.math.top_k(values, values.shape[-1]).indices


def _sort_other_axis(values: tf.Tensor, axis: Any = -1, direction: str = "ASCENDING") -> tf.Tensor:
    rank = len(values.shape)
    order = list(range(rank))
    require(isinstance(axis, int) and 0 < axis % rank < rank - 1)
    order[axis], order[-1] = order[-1], order[axis]
    return tf.transpose(tf.sort(tf.transpose(values, order), -1, direction), order)


def _choose(condition: tf.Tensor, x: tf.Tensor = None, y: tf.Tensor = None) -> tf.Tensor:
    """Expand `tf.where` with a constant condition to `x * chosen + y * (1 - chosen)`.

    Values such as -1e9 are refused, because they need a wide range. They usually mask scores.
    """
    condition = np.asarray(condition)
    numbers = [read_scalar(end) for end in (x, y)]
    require(condition.dtype == bool and (x is not None and y is not None))
    require(all(end is None or abs(end) < -HIDES for end in numbers))
    chosen = condition.astype(np.float32)
    return x * chosen + y * (1 - chosen)


def _pad(
    tensor: tf.Tensor, paddings: Any, mode: str = "CONSTANT", constant_values: Any = 0
) -> tf.Tensor:
    value = read_scalar(constant_values)
    require(mode.upper() == "CONSTANT" and value and math.isfinite(value))
    return tf.pad(tensor - value, paddings) + value


def _boolean_mask(tensor: tf.Tensor, mask: tf.Tensor, axis: Any = None) -> tf.Tensor:
    """Expand `tf.boolean_mask` to `tf.gather` if the mask is the same for all examples."""
    if is_tensor(mask):
        example = unwrap(find_example(get_value(mask)))
        require(tensor.dtype.is_floating and example.ndim and not axis)
        rest = tensor.shape[1 + example.ndim :]
        require(None not in tensor.shape[1:])
        rows = tf.reshape(tensor, [-1, example.size, *rest])
        return tf.reshape(tf.gather(rows, np.flatnonzero(example), axis=1), [-1, *rest])
    mask = np.asarray(mask)
    require(mask.ndim > 0 and mask.dtype == bool and read_scalar(axis) is not None and axis > 0)
    before, after = tensor.shape[1:axis], tensor.shape[axis + mask.ndim :]
    if mask.ndim > 1:
        require(None not in (*before, *after))
        tensor = tf.reshape(tensor, [-1, *before, mask.size, *after])
    return tf.gather(tensor, np.flatnonzero(mask), axis=axis)


EARLY: dict[str, Expansion] = {
    "argsort": _argsort,
    "batch_flatten": _flatten,
    "boolean_mask": _boolean_mask,
    "l2_normalize": _normalize_axes,
    "pad": _pad,
    "softmax": _softmax_of_stack,
    "sort": _sort_other_axis,
    "where": _choose,
    "repeat": _repeat,
}

EARLY_OF_INTEGERS: dict[str, Expansion] = {
    "boolean_mask": _boolean_mask,
    "sequence_mask": _sequence_mask,
}

OPERATIONS: dict[str, Expansion] = {
    "getitem": _getitem,
    "strided_slice": _strided_slice,
    "reshape": _reshape,
    "roll": _roll,
    "sort": _sort,
    "gather_nd": _gather_nd,
}
