"""Lowers copies of tensors, and tensors of one number for each example."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, map_values, values_in
from keras_qat.graph.operations import kind_of
from keras_qat.graph.size_expressions import (
    BATCH,
    computed_sizes,
    evaluate_shape,
    measured_tensors,
    rows_of,
    size_of,
)
from keras_qat.graph.tf_operations import array, number, operands
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.uniform_constants import SIZES, evaluate_fill
from keras_qat.ops.movement import integers

COPIES = {"tile": ("multiples",), "repeat": ("repeats", "axis"), "broadcast_to": ("shape",)}
"""Operation that copies -> names of its arguments after the tensor."""


def split_copies(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers copies of a tensor for each example, such as a class token, to zeros and a sum.

    All sizes are then known before the file runs, which runtimes need. Counts that are known sizes
    become numbers.
    """
    kind = kind_of(call)
    x, counts, *axis = operands(call, "input", *COPIES[kind])
    known_counts = {value: size_of(value) for value in values_in(counts)}
    numbers = {value: size for value, size in known_counts.items() if isinstance(size, int)}
    if numbers:
        args, kwargs = map_values(lambda value: numbers.get(value, value), (call.args, call.kwargs))
        return [Call(call.layer, args, kwargs, call.outputs, call.name)]
    is_list, known = isinstance(counts, (list, tuple)), None
    if not is_list and kind != "repeat":
        known = computed_sizes(counts)  # tf.broadcast_to(x, tf.shape(y))
    count, *inner_counts = known or (counts if is_list else [counts])
    if not isinstance(x, Value):
        x, inner_counts = _repeated_inside(call, x, inner_counts)
    rank = 0 if x is None else len(x.shape)
    is_batch = isinstance(count, Value) and size_of(count) == BATCH
    is_batch = is_batch or bool(known and known[0] == BATCH)
    if not rank or not call.output.is_float or axis not in ([], [0]):
        return []
    unchanged = x.shape[1:] if kind == "broadcast_to" else [1] * (rank - 1)
    if kind != "repeat" and list(inner_counts) != list(unchanged):
        return []
    group = _rows_for_each_copy(counts, x.shape[0]) if kind == "tile" else None
    if not (is_batch and x.shape[0] == 1) and group is None:
        return []
    sizes = counts if known else count
    if group is None:
        return _for_each_example(call, context, sizes, x, rank)
    return _table_for_each_example(call, context, sizes, x, group)


def _rows_for_each_copy(counts: Any, size: int | None) -> int | None:
    """Returns how many rows of the measured tensor one copy stands for; None if unknown.

    Either one, or as many as the copied table has, `size`: one row for each head, where examples
    and heads are one axis.
    """
    like, runs = next(measured_tensors(values_in(counts)), None), evaluate_shape(counts)
    if like is None or not runs or size in (1, None):
        return None
    for count in (1, size):
        if [count * run[0] for run in runs] == rows_of(like):
            return count
    return None


def split_filled(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a number for each example, as a state that is zero at first, to zeros and a sum."""
    x = evaluate_fill(call)
    if x is None:
        return []
    sizes = operands(call, SIZES[kind_of(call)])[0]
    return _for_each_example(call, context, sizes, x, x.ndim)


def split_eye(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a unit matrix for each example, as masks are made of, to zeros and a sum."""
    *sizes, batch = operands(call, "num_rows", "num_columns", "batch_shape")
    rows, columns = (size_of(size) if isinstance(size, Value) else number(size) for size in sizes)
    is_batch = values_in(batch) and computed_sizes(batch) == [BATCH]
    if not is_batch or not call.output.is_float or rows in (None, BATCH) or columns == BATCH:
        return []
    x = np.eye(int(rows), None if columns is None else int(columns), dtype=np.float32)[None]
    return _for_each_example(call, context, batch, x, 3)


def _for_each_example(
    call: Call, context: LoweringContext, sizes: Any, x: Any, rank: int
) -> list[Call]:
    """Replaces a call by the sum of a tensor with one example and of zeros for each example.

    Args:
        call: the call.
        context: keeps the layers that are made.
        sizes: holds the number of examples, of `tf.shape` of a tensor.
        x: the value or array.
        rank: how many axes it has.
    """
    parts = PartsBuilder(call, context)
    zeros = _zeros(parts, sizes, [1] * (rank - 1))
    if zeros is None:
        return []
    return parts.end(parts.new("", type(call.layer), tf.math.add), zeros, x)


def _table_for_each_example(
    call: Call, context: LoweringContext, sizes: Any, x: Any, group: int
) -> list[Call]:
    """Replaces a call by copies of a table, whose rows are those of one example.

    Args:
        call: the call.
        context: keeps the layers that are made.
        sizes: holds the number of rows, of `tf.shape` of a tensor.
        x: the value or array.
        group: how many of these rows stand for one copy.
    """
    parts, operation = PartsBuilder(call, context), type(call.layer)
    zeros = _zeros(parts, sizes, [group, *[1] * (len(x.shape) - 1)])
    if zeros is None:
        return []
    if isinstance(x, Value):
        one = parts.new("one", operation, tf.reshape)
        table = parts.add(one, x, [1, *x.shape], shape=(1, *x.shape))
    else:
        table = x[None]
    add = parts.new("copies", operation, tf.math.add)
    copies = parts.add(add, zeros, table, shape=(None, *x.shape))
    return parts.end(parts.new("", operation, tf.reshape), copies, [-1, *x.shape[1:]])


def _zeros(parts: PartsBuilder, sizes: Any, inner: list[int]) -> Value | None:
    """Adds zeros of shape [examples, *inner]; returns None if no tensor is measured.

    Args:
        parts: gets the calls.
        sizes: holds the number of examples, of `tf.shape` of a tensor.
        inner: sizes of the other axes. One example takes as many rows of the measured tensor as
            their product.
    """
    batch = next(measured_tensors(values_in(sizes)), None)
    if batch is None or not batch.shape:
        return None
    ones, operation = [1] * (len(batch.shape) - 1), type(parts.call.layer)
    first = parts.add(
        parts.new("first", operation, tf.slice),
        batch,
        [0] * len(batch.shape),
        [-1, *ones],
        output=Value(f"{parts.call.name}_first", (None, *ones), batch.dtype),
    )
    if not batch.is_float:
        cast = parts.new("cast", operation, tf.cast)
        first = parts.add(cast, first, kwargs={"dtype": "float32"}, shape=first.shape)
    if ones != inner:
        reshape = parts.new("reshape", operation, tf.reshape)
        first = parts.add(reshape, first, [-1, *inner], shape=(None, *inner))
    if inner:
        return parts.add(parts.new("zeros", layers.Rescaling, 0.0), first, shape=first.shape)
    # Without channels.
    product = parts.new("zeros", operation, tf.math.multiply)
    return parts.add(product, first, 0.0, shape=first.shape)


def _repeated_inside(call: Call, x: Any, counts: list[Any]) -> tuple[Any, list[Any]]:
    """Returns a constant with all copies but those for the batch, and what is left of the counts.

    The constant is None where it is not known.
    """
    values, known = array(x), integers(counts) if counts else ()
    if values is None or known is None:
        return None, counts
    if kind_of(call) == "tile":
        repeated = np.tile(values, (1, *known))
        return repeated.astype(np.float32), [1] * len(known)
    if kind_of(call) == "broadcast_to" and values.ndim <= len(known) + 1:
        values = np.broadcast_to(values, (1, *known))
    return values.astype(np.float32), counts
