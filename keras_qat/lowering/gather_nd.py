"""Lowers tf.gather_nd of a tensor to tf.gather along one axis, for which there is a kernel."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.size_expressions import counts_examples
from keras_qat.graph.tf_operations import is_operation, number, operands
from keras_qat.lowering.builder import LoweringContext, PartsBuilder

ARGUMENTS = {
    "gather_nd": ("params", "indices", "batch_dims", "name"),
    "compat.v1.gather_nd": ("params", "indices", "name", "batch_dims"),
}
"""Operation -> its arguments in order."""


def split_gather_nd(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.gather_nd within each example.

    The numbers of the examples are told by `batch_dims=1`, or are the first of the indices, as in
    `tf.gather_nd(images, tf.stack([examples, rows, columns], -1))`.
    """
    names = ARGUMENTS[str(call.layer.symbol)]
    given = dict(zip(names, operands(call, *names), strict=True))
    x, indices, batch = given["params"], given["indices"], number(given["batch_dims"] or 0)
    if not isinstance(x, Value) or not isinstance(indices, Value) or not indices.shape[-1]:
        return []
    columns = _stacked(indices) or [None] * indices.shape[-1]
    skipped = int(batch == 0)
    if batch not in (0, 1) or (skipped and not counts_examples(columns[0])):
        return []
    shape: Any = x.shape
    end = indices.shape[-1] + 1 - skipped
    sizes, rest = shape[1:end], shape[end:]
    if not sizes or None in (*sizes, *rest):
        return []
    parts = PartsBuilder(call, context)

    def add(part: str, function: Any, like: Value, shape: Any, *args: Any) -> Value:
        layer = parts.new(part, type(call.layer), function, dtype=like.dtype)
        output = Value(parts.path(layer), tuple(shape), like.dtype)
        return parts.add(layer, *args, output=output)

    position = None
    for index, size in enumerate(sizes):
        column = columns[index + skipped]
        if column is None:
            layer = parts.new(f"column_{index}", type(call.layer), tf.gather, dtype=indices.dtype)
            output = Value(parts.path(layer), indices.shape[:-1], indices.dtype)
            which = {"axis": len(indices.shape) - 1}
            column = parts.add(layer, indices, index + skipped, kwargs=which, output=output)
        if position is not None:
            scaled = add(f"row_{index}", tf.multiply, indices, column.shape, position, size)
            column = add(f"sum_{index}", tf.add, indices, column.shape, scaled, column)
        position = column
    if len(sizes) > 1:
        wanted = [-1, math.prod(sizes), *rest]
        x = add("flat", tf.reshape, x, (x.shape[0], *wanted[1:]), x, wanted)
    last = parts.new("", type(call.layer), tf.gather)
    return parts.end(last, x, position, kwargs={"axis": 1, "batch_dims": 1})


def _stacked(indices: Value) -> list[Any] | None:
    """Returns the tensors that were stacked along the last axis; None if indices are no stack."""
    call = indices.producer
    if call is None or not is_operation(call.layer) or call.layer.symbol != "stack":
        return None
    values, axis = operands(call, "values", "axis")
    is_last = axis in (-1, len(indices.shape) - 1)
    known = isinstance(values, (list, tuple)) and all(isinstance(x, Value) for x in values)
    return list(values) if is_last and known else None
