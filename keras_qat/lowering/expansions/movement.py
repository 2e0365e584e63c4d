"""Expands slices, reshapes, rolls and sorts."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.graph.size_expressions import BATCH, computed_sizes
from keras_qat.helper_layers.operations import Roll
from keras_qat.lowering.expand_call import Expansion, call_of, is_tensor, require, value_of
from keras_qat.ops.movement import MAX_SLICED
from keras_qat.ops.slicing import SLICE, items_for_axes


def _getitem(tensor: Any, slice_spec: Any, var: Any = None) -> Any:
    if sum(item is Ellipsis for item in tf.nest.flatten(slice_spec)) == 1:
        # No configuration holds an Ellipsis.
        items = items_for_axes(slice_spec, len(tensor.shape))
        return tf.__operators__.getitem(tensor, tuple(items))
    call = call_of(tensor)
    ranges = SLICE.attributes(call)["parts"]
    require(len(call.inputs) == 1 and ranges)
    if len(tensor.shape) > MAX_SLICED:
        return _slice_axis_by_axis(tensor, call, ranges)
    # Keras does not infer the shape of `sizes[::-1]` if a size is open.
    is_vector = len(tensor.shape) == len(call.output.shape) == 1
    require(is_vector and not tensor.dtype.is_floating and ranges == ((None, None, -1),))
    return tf.reverse(tensor, [0])


def _slice_axis_by_axis(x: Any, call: Call, ranges: Any) -> Any:
    """Slice a tensor of many axes along one axis at a time, with the axes around it merged."""
    sizes: list[Any] = list(x.shape)
    require(None not in (*sizes[1:], *call.output.shape[1:]) and ranges[0] == (None, None, 1))
    for axis, (start, stop, step) in enumerate(ranges[1:], 1):
        if axis in SLICE.attributes(call)["dropped"]:
            stop = start + 1 or None
        left = len(range(*slice(start, stop, step).indices(sizes[axis])))
        if left == sizes[axis] and step == 1:
            continue
        around = math.prod(sizes[1:axis]), math.prod(sizes[axis + 1 :])
        x = tf.reshape(x, [-1, around[0], sizes[axis], around[1]], name=f"joined_{axis}")
        x = x[:, :, start:stop:step]
        sizes[axis] = left
    return tf.reshape(x, [-1, *call.output.shape[1:]])


def _strided_slice(
    input_: Any,
    begin: Any,
    end: Any,
    strides: Any = None,
    *masks: Any,
    var: Any = None,
    name: Any = None,
    **other_masks: Any,
) -> Any:
    """Slice all examples, without gaps."""
    require(not any(map(is_tensor, (begin, end, strides))))
    known = (*begin, *end[1:], *(strides or ()))
    require(all(isinstance(number, int) for number in known) and not begin[0])
    require(not any(masks) and not any(other_masks.values()) and {*(strides or ())} <= {1})
    require(computed_sizes([value_of(end[0])]) == [BATCH])
    require(None not in input_.shape[1 : len(begin)])
    entries = [
        range(size)[low:high]
        for size, low, high in zip(input_.shape[1:], begin[1:], end[1:], strict=False)
    ]
    left = len(input_.shape) - len(begin)
    begins = [0, *(part.start for part in entries), *[0] * left]
    return tf.slice(input_, begins, [-1, *map(len, entries), *[-1] * left])


def _reshape(tensor: Any, shape: Any, name: Any = None) -> Any:
    """Reshape to known sizes instead of those that are read with `tf.shape`."""
    require(any(map(is_tensor, tf.nest.flatten(shape))) and is_tensor(tensor))
    sizes = call_of(tensor).output.shape[1:]
    require(None not in sizes)
    return tf.reshape(tensor, [-1, *sizes])


def _roll(input: Any, shift: Any, axis: Any, name: Any = None) -> Any:
    shifts, axes = tf.nest.flatten(shift), tf.nest.flatten(axis)
    require(all(isinstance(number, int) for number in [*shifts, *axes]))
    return Roll(shifts, axes)(input)


def _sort(values: Any, axis: Any = -1, direction: Any = "ASCENDING", name: Any = None) -> Any:
    """Sort along the last axis by taking the largest of all values."""
    rank, size = len(values.shape), values.shape[-1]
    require(axis in (None, -1, rank - 1) and size is not None and rank > 1)
    require(values.dtype.is_floating)
    largest, _ = tf.math.top_k(values, size, name="largest")
    return largest if direction == "DESCENDING" else tf.reverse(largest, [rank - 1])


MOVEMENT: dict[str, Expansion] = {
    "getitem": _getitem,
    "strided_slice": _strided_slice,
    "reshape": _reshape,
    "roll": _roll,
    "sort": _sort,
}
"""Kind of an operation -> its expansion."""
