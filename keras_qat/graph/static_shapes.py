"""Finds sizes that tracing left open, as of `tf.reshape(x, [tf.shape(x)[0], -1, size])`."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, map_values, values_in
from keras_qat.graph.size_expressions import BATCHES, computed_sizes, rows_of, sizes_in_both_runs
from keras_qat.graph.tf_operations import is_operation, operands
from keras_qat.keras2.backend import keras, output_shape
from keras_qat.keras2.layer_names import is_of_keras

Shape = tuple[int | None, ...]


def close_sizes(graph: Graph) -> None:
    """Sets the sizes and rows of values that follow from the inputs of their calls, in place."""
    for _ in closing_sizes(graph.calls):
        pass


def closing_sizes(calls: Iterable[Call]) -> Iterator[Call]:
    """Yields calls, each after the sizes and rows are set that follow from its inputs."""
    closed: set[Value] = set()
    for call in calls:
        values = values_in(call.outputs)
        symbol = str(getattr(call.layer, "symbol", ""))
        is_known = not any(None in value.shape[1:] for value in call.inputs)
        may_close = is_known or not closed.isdisjoint(call.inputs)
        if may_close and any(None in value.shape[1:] for value in values):
            shapes = _of_reshape(call) if symbol == "reshape" else _inferred(call)
            for value, shape in zip(values, shapes, strict=False):
                value.shape = shape
            closed.update(values)
        for value, rows in zip(values, _rows(call, symbol), strict=False):
            value.rows = rows if value.shape[:1] == (None,) else value.rows
        yield call


_MOVES = {
    *("tile", "repeat", "concat", "split", "gather", "compat.v1.gather", "gather_nd"),
    *("__operators__.getitem", "slice", "strided_slice"),
}
"""Operations that may return other rows than they read."""


def _rows(call: Call, symbol: str) -> Iterator[Fraction]:
    """Yields the rows of each example that a call returns, where the first axis is open."""
    read = [value.rows for value in call.inputs if value.shape[:1] == (None,)]
    others = itertools.repeat(max(read, default=Fraction(1)))
    if symbol == "reshape":
        x, _ = operands(call, "tensor", "shape")
        sizes: Any = call.output.shape[1:]
        if x.shape[:1] == (None,) and not {None, 0} & {*x.shape[1:], *sizes}:
            others = itertools.repeat(x.rows * math.prod(x.shape[1:]) / math.prod(sizes))
    elif symbol in _MOVES and any(value.shape[:1] == (None,) for value in values_in(call.outputs)):
        with contextlib.suppress(ValueError):
            firsts: list[Any] = [shape[:1] for shape in _shapes_in_graph(call, _of_two_examples)]
            if all(firsts) and (None,) not in firsts:
                return iter([Fraction(first, BATCHES[0]) for (first,) in firsts])
    return others


def _of_two_examples(value: Value) -> Any:
    """Returns the sizes that a value holds for two examples, or a placeholder for it."""
    shape: Any = (rows_of(value)[0], *value.shape[1:]) if value.shape else ()
    sizes = None if value.is_float or None in value.shape else sizes_in_both_runs(value)
    if sizes:
        return tf.constant(np.reshape(sizes[0], shape), value.dtype)
    return tf.compat.v1.placeholder(value.dtype, shape)


def _of_reshape(call: Call) -> list[Shape]:
    """Returns the shape of a reshape to sizes that are known but for the number of examples.

    The first one may be a multiple of that: attention that makes one axis of examples and heads.
    """
    x, shape = operands(call, "tensor", "shape")
    first, *others = x.shape
    if None in others:
        return []
    both = []
    for batch, sizes in zip(BATCHES, sizes_in_both_runs(shape) or [], strict=False):
        if 0 in sizes or sizes.count(-1) > 1:
            return []
        rest = (first or batch * x.rows) * Fraction(math.prod(others), -math.prod(sizes))
        if -1 in sizes and rest.denominator > 1:
            return []
        both.append([int(rest) if size == -1 else size for size in sizes])
    if not both or both[0][1:] != both[1][1:]:
        return []
    return [(first, *both[0][1:])]


def _inferred(call: Call) -> list[Shape]:
    """Returns the shapes of what a call computes, as TensorFlow infers them."""
    if not is_operation(call.layer):
        method = type(call.layer).compute_output_shape
        # That of the base class would call the layer.
        knows = is_of_keras(call.layer) and method is not keras.layers.Layer.compute_output_shape
        if (
            not knows
            or len(call.args) != 1
            or values_in(call.kwargs)
            or values_in(call.outputs)[1:]
        ):
            return []
        shapes = map_values(lambda value: tf.TensorShape(value.shape), call.args[0])
        return [tuple(tf.TensorShape(output_shape(call.layer, shapes)))]
    return _shapes_in_graph(call, _tensor_like)


def _shapes_in_graph(call: Call, like: Callable[[Value], Any]) -> list[Shape]:
    """Returns the shapes that TensorFlow infers, of tensors that are `like` what a call reads."""
    with tf.__internal__.FuncGraph("sizes").as_default():  # Takes constants of arguments.
        tensors = {x: like(x) for x in call.inputs}
        args, kwargs = map_values(tensors.__getitem__, (call.args, call.kwargs))
        results = tf.nest.flatten(call.layer.call(*args, **kwargs))
    return [tuple(result.shape.as_list()) for result in results]


def _tensor_like(value: Value) -> Any:
    """Returns the numbers that a value holds if they are sizes, or a placeholder for it."""
    shape: Any = value.shape
    sizes = None if value.is_float or None in shape else computed_sizes(value)
    if sizes and all(isinstance(size, int) and size >= 0 for size in sizes):
        return tf.constant(np.reshape(sizes, shape), value.dtype)
    return tf.compat.v1.placeholder(value.dtype, value.shape)
