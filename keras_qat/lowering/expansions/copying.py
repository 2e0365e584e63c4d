"""Expands operations that copy a tensor for each example, such as the class token of a ViT.

`tf.repeat(token, tf.shape(x)[0], 0)` becomes `zeros + token`, with zeros computed from `x`. Some
runtimes do not support the first form, because it computes the number of copies at run time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.facts import Facts
from keras_qat.graph.operations import get_argument, get_kind, get_operands, read_array, read_scalar
from keras_qat.graph.sizes import (
    BATCH,
    count_rows,
    evaluate_shape,
    find_measured_tensors,
    find_size,
    find_sizes,
)
from keras_qat.keras2.backend import layers
from keras_qat.lowering.expand_call import (
    CannotExpand,
    Expansion,
    get_call,
    is_tensor,
    make_symbol,
    require,
    unwrap,
)
from keras_qat.lowering.read_operations import read_uniform
from keras_qat.ops.movement import read_integers

COPIES = {"tile": ("multiples",), "repeat": ("repeats", "axis"), "broadcast_to": ("shape",)}
"""Maps an operation that copies a tensor to the names of its other arguments."""

SIZES = {"zeros": "shape", "ones": "shape", "fill": "dims"}
"""Maps an operation that fills a tensor to the name of the argument with the shape."""


def _copy(*args: object, **kwargs: object) -> tf.Tensor:
    """Expand an operation in `COPIES` if it copies a tensor once for each example."""
    call = _find_call(args, kwargs)
    kind = get_kind(call)
    x, counts, *axis = get_operands(call, "input", *COPIES[kind])
    sizes = {value: find_size(value) for value in flatten_values(counts)}
    if any(isinstance(size, int) for size in sizes.values()):
        return _use_sizes(call, sizes)
    is_list, known_counts = isinstance(counts, (list, tuple)), None
    if not is_list and kind != "repeat":
        known_counts = find_sizes(counts)  # tf.broadcast_to(x, tf.shape(y))
    count, *inner_counts = known_counts or (counts if is_list else [counts])
    if not isinstance(x, Value):
        x, inner_counts = _repeat_inside(kind, x, inner_counts)
    rank = 0 if x is None else len(x.shape)
    require(rank and call.output.is_float and axis in ([], [0]))
    unchanged = x.shape[1:] if kind == "broadcast_to" else [1] * (rank - 1)
    require(kind == "repeat" or list(inner_counts) == list(unchanged))
    is_batch = isinstance(count, Value) and find_size(count) == BATCH
    is_batch = is_batch or bool(known_counts and known_counts[0] == BATCH)
    group = _count_rows_for_copy(counts, x.shape[0]) if kind == "tile" else None
    require((is_batch and x.shape[0] == 1) or group is not None)
    table = make_symbol(x) if isinstance(x, Value) else x
    measured = counts if known_counts else count
    if group is None:
        return tf.add(_make_zeros(measured, [1] * (rank - 1)), table)
    zeros = _make_zeros(measured, [group, *[1] * (rank - 1)])
    one = tf.reshape(table, [1, *x.shape], name="one") if is_tensor(table) else table[None]
    return tf.reshape(tf.add(zeros, one, name="copies"), [-1, *x.shape[1:]])


def _fill(*args: object, **kwargs: object) -> tf.Tensor:
    """Expand `tf.zeros`, `tf.ones` or `tf.fill` if the first size is the batch size."""
    call = _find_call(args, kwargs)
    sizes = get_argument(call, SIZES[get_kind(call)])
    batch, *inner = unwrap(find_sizes(sizes))
    require(flatten_values(sizes) and batch == BATCH and not {BATCH, -1}.intersection(inner))
    require(call.output.is_float)
    x = np.full([1, *inner], unwrap(read_uniform(call.output, Facts())), np.float32)
    return tf.add(_make_zeros(sizes, [1] * len(inner)), x)


def _eye(*args: object, **kwargs: object) -> tf.Tensor:
    call = _find_call(args, kwargs)
    *sizes, batch = get_operands(call, "num_rows", "num_columns", "batch_shape")
    rows, columns = (
        find_size(size) if isinstance(size, Value) else read_scalar(size) for size in sizes
    )
    require(flatten_values(batch) and find_sizes(batch) == [BATCH] and call.output.is_float)
    require(rows != BATCH and columns != BATCH)
    x = np.eye(int(unwrap(rows)), None if columns is None else int(columns), dtype=np.float32)[None]
    return tf.add(_make_zeros(batch, [1, 1]), x)


def _find_call(args: object, kwargs: object) -> Call:
    """Return the call that is being expanded, from one of its arguments."""
    tensor = next(filter(is_tensor, tf.nest.flatten((args, kwargs))), None)
    require(tensor is not None)
    return get_call(tensor)


def _use_sizes(call: Call, sizes: dict[Value, Any]) -> tf.Tensor:
    """Repeat a call. Pass an integer for a size that is known, such as `tf.shape(x)[1]`."""
    numbers = {value: size for value, size in sizes.items() if isinstance(size, int)}
    args, kwargs = map_values(
        lambda value: numbers[value] if value in numbers else make_symbol(value),
        (call.args, dict(call.kwargs)),
    )
    return call.layer(*args, **kwargs)


def _count_rows_for_copy(counts: Any, size: int | None) -> int | None:
    """Return 1 for `tf.tile(table, [tf.shape(x)[0], 1])`: one copy for each row of `x`.

    Return `size`, the number of rows of the table, for `[tf.shape(x)[0] // size, 1]`. Return None
    for other `counts`.
    """
    like, runs = next(find_measured_tensors(flatten_values(counts)), None), evaluate_shape(counts)
    if like is None or not runs or size in (1, None):
        return None
    for count in (1, size):
        if [count * run[0] for run in runs] == count_rows(like):
            return count
    return None


def _make_zeros(sizes: Any, inner: list[int]) -> tf.Tensor:
    """Return zeros of shape [batch, *inner].

    Args:
        sizes: tensors computed with `tf.shape(x)`. The zeros have the batch size of `x`.
        inner: sizes of the other axes.
    """
    batch = next(find_measured_tensors(flatten_values(sizes)), None)
    if batch is None or not batch.shape:
        raise CannotExpand
    ones = [1] * (len(batch.shape) - 1)
    first = tf.slice(make_symbol(batch), [0] * len(batch.shape), [-1, *ones], name="first")
    if not batch.is_float:
        first = tf.cast(first, dtype="float32", name="cast")
    if ones != inner:
        first = tf.reshape(first, [-1, *inner], name="reshape")
    if inner:
        return layers.Rescaling(0.0, name="zeros")(first)
    return tf.multiply(first, 0.0, name="zeros")  # A Rescaling needs channels.


def _repeat_inside(kind: str, x: tf.Tensor, counts: list[Any]) -> tuple[Any, list[Any]]:
    """Copy a constant along its inner axes: `tf.tile(x, [n, 2])` becomes `tf.tile(copy, [n, 1])`.

    `counts` is [2] here. Return the copy and the new counts. The copy is None if `x` is a tensor.
    """
    values, known = read_array(x), read_integers(counts) if counts else ()
    if values is None or known is None:
        return None, counts
    if kind == "tile":
        repeated = np.tile(values, (1, *known))
        return repeated.astype(np.float32), [1] * len(known)
    if kind == "broadcast_to" and values.ndim <= len(known) + 1:
        values = np.broadcast_to(values, (1, *known))
    return values.astype(np.float32), counts


OPERATIONS: dict[str, Expansion] = {
    **dict.fromkeys(COPIES, _copy),
    **dict.fromkeys(("zeros", "ones", "fill"), _fill),
    "eye": _eye,
}
