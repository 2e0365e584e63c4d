"""Finds sizes that tracing left open, as of `tf.reshape(x, [tf.shape(x)[0], -1, size])`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.facts import Facts
from keras_qat.graph.operations import get_kind, is_operation
from keras_qat.graph.size_expressions import (
    BATCHES,
    count_rows,
    evaluate,
    evaluate_shape,
    find_known_sizes,
)
from keras_qat.graph.tf_operations import get_argument, get_operands
from keras_qat.keras2.backend import infer_output_shape, keras
from keras_qat.keras2.layer_names import is_of_keras

Shape = tuple[int | None, ...]

CHANGES_ROWS = {
    *("tile", "repeat", "concat", "split", "gather", "gather_nd"),
    *("getitem", "slice", "strided_slice"),
}
"""Operations that may return other rows than they read."""


def set_static_shapes(graph: Graph) -> None:
    """Sets the sizes and rows of values that follow from the inputs of their calls, in place."""
    for _ in set_shapes_in_order(graph.calls):
        pass


def set_shapes_in_order(calls: Iterable[Call]) -> Iterator[Call]:
    """Yields calls, each after the sizes and rows are set that follow from its inputs."""
    facts = Facts()  # A call's inputs change no more before they are asked about.
    closed: set[Value] = set()
    for call in calls:
        values = flatten_values(call.outputs)
        kind = get_kind(call)
        is_known = not any(None in value.shape[1:] for value in call.inputs)
        may_close = is_known or not closed.isdisjoint(call.inputs)
        if may_close and any(None in value.shape[1:] for value in values):
            infer = _infer_reshape if kind == "reshape" else infer_shapes
            shapes = infer(call, facts)
            for value, shape in zip(values, shapes, strict=False):
                value.shape = shape
            closed.update(values)
        if any(value.shape[:1] == (None,) for value in values):
            for value, rows in zip(values, _infer_rows(call, kind, facts), strict=True):
                value.rows = rows if value.shape[:1] == (None,) else value.rows
        yield call


def _infer_rows(call: Call, kind: str, facts: Facts) -> list[Fraction]:
    """Returns how many rows of each output stand for an example, if the first axis is open."""
    read = [value.rows for value in call.inputs if value.shape[:1] == (None,)]
    values = flatten_values(call.outputs)
    if kind == "reshape":
        x = get_argument(call, "tensor")
        sizes: Any = call.output.shape[1:]
        if x.shape[:1] == (None,) and not {None, 0} & {*x.shape[1:], *sizes}:
            return [x.rows * math.prod(x.shape[1:]) / math.prod(sizes)]
    elif kind in CHANGES_ROWS:

        def stand_in(value: Value) -> Any:
            """Returns the sizes that a value holds for two examples, or a placeholder for it."""
            shape: Any = (count_rows(value)[0], *value.shape[1:]) if value.shape else ()
            runs = None if value.is_float or None in value.shape else evaluate(value, facts)
            if runs is not None:
                return tf.constant(np.reshape(runs[0], shape), value.dtype)
            return tf.compat.v1.placeholder(value.dtype, shape)

        with contextlib.suppress(ValueError):
            firsts: list[Any] = [shape[:1] for shape in _infer_in_graph(call, stand_in)]
            if all(firsts) and (None,) not in firsts:
                return [Fraction(first, BATCHES[0]) for (first,) in firsts]
    return [max(read, default=Fraction(1))] * len(values)


def _infer_reshape(call: Call, facts: Facts) -> list[Shape]:
    """Returns the shape of a reshape to sizes that are known but for the number of examples.

    The first one may be a multiple of that: attention that makes one axis of examples and heads.
    """
    x, shape = get_operands(call, "tensor", "shape")
    first, *others = x.shape
    if None in others:
        return []
    both = []
    for batch, sizes in zip(BATCHES, evaluate_shape(shape, facts) or [], strict=False):
        if 0 in sizes or sizes.count(-1) > 1:
            return []
        rest = (first or batch * x.rows) * Fraction(math.prod(others), -math.prod(sizes))
        if -1 in sizes and rest.denominator > 1:
            return []
        both.append([int(rest) if size == -1 else size for size in sizes])
    if not both or both[0][1:] != both[1][1:]:
        return []
    return [(first, *both[0][1:])]


def infer_shapes(call: Call, facts: Facts) -> list[Shape]:
    """Return the shapes of a call's outputs, as TensorFlow or Keras infers them; [] if unknown."""
    if not is_operation(call.layer):
        method = type(call.layer).compute_output_shape
        # That of the base class would call the layer.
        knows = is_of_keras(call.layer) and method is not keras.layers.Layer.compute_output_shape
        has_one = len(call.args) == 1 and not flatten_values(call.kwargs)
        if not knows or not has_one or flatten_values(call.outputs)[1:]:
            return []
        shapes = map_values(lambda value: tf.TensorShape(value.shape), call.args[0])
        return [tuple(tf.TensorShape(infer_output_shape(call.layer, shapes)))]

    def stand_in(value: Value) -> Any:
        """Returns the sizes that a value holds, or a placeholder for it."""
        shape: Any = value.shape
        sizes = None if value.is_float or None in shape else find_known_sizes(value, facts)
        if sizes:
            return tf.constant(np.reshape(sizes, shape), value.dtype)
        return tf.compat.v1.placeholder(value.dtype, value.shape)

    return _infer_in_graph(call, stand_in)


def _infer_in_graph(call: Call, stand_in: Callable[[Value], Any]) -> list[Shape]:
    """Returns the shapes that TensorFlow infers if a call reads the `stand_in` of its inputs."""
    with tf.__internal__.FuncGraph("sizes").as_default():  # Takes constants of arguments.
        tensors = {x: stand_in(x) for x in call.inputs}
        args, kwargs = map_values(tensors.__getitem__, (call.args, call.kwargs))
        results = tf.nest.flatten(call.layer.call(*args, **kwargs))
    return [tuple(result.shape.as_list()) for result in results]
