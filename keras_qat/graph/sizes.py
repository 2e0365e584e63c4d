"""Evaluates size expressions, such as `sqrt(tf.shape(x)[-1])`, and infers static shapes.

An expression is evaluated for two batch sizes. It is a constant if both results are equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, NDArray

from keras_qat.graph.calls import Call, Graph, Value, drop_unused_calls, flatten_values, map_values
from keras_qat.graph.facts import Facts, Rule, reach
from keras_qat.graph.operations import (
    MOVES,
    draws_random_numbers,
    get_argument,
    get_kind,
    get_operands,
    is_operation,
)
from keras_qat.keras2.backend import infer_output_shape, keras
from keras_qat.keras2.layers_and_models import is_of_keras

_SLICES = ("getitem", "slice", "strided_slice")
"""Operations in which `fold_known_sizes` replaces sizes that depend on a fixed batch size."""

_CHANGES_ROWS = {
    *("tile", "repeat", "concat", "split", "gather", "gather_nd"),
    *("getitem", "slice", "strided_slice"),
}
"""Operations that may change the size of the first axis."""

FILLS = {"ones_like": 1, "zeros_like": 0}
"""Maps operations that return a constant tensor to the value of its elements."""

BATCHES = 2, 61
"""Two batch sizes for which size expressions are evaluated."""

BATCH = "batch"
"""Placeholder for the size of the first axis, which may vary."""

UNKNOWN = int(np.iinfo(np.int32).min)
"""Placeholder for an unknown size in a partially known shape."""

Runs = tuple[NDArray[Any], NDArray[Any]]
"""Values of a tensor for the two batch sizes."""

Shape = tuple[int | None, ...]


def find_results(
    call: Call | None, fills: bool = False
) -> Generator[Call | None, Any, list[Runs] | None]:
    """Evaluates the outputs of a call for two batch sizes. This generator is a `Rule`.

    Returns None if the outputs depend on the data of a tensor.

    Args:
        call: the call.
        fills: True to evaluate `ones_like` and `zeros_like` even for tensors with unknown data.
    """
    if call is None or not is_operation(call.layer) or not call.inputs:
        return None
    kind, dtype = get_kind(call), flatten_values(call.outputs)[0].dtype
    x, shape = call.inputs[0], list[Any](call.inputs[0].shape[1:])
    if kind == "shape" and x.shape:
        inner = [UNKNOWN if size is None else size for size in shape]
        first, second = (np.array([rows, *inner], dtype) for rows in count_rows(x))
        return [(first, second)]
    if kind == "rank" and x.shape:
        return [(np.array(len(x.shape), dtype),) * 2]
    if fills and kind in FILLS and None not in shape:
        first, second = (np.full([rows, *shape], FILLS[kind], dtype) for rows in BATCHES)
        return [(first, second)]
    known: dict[Value, Runs] = {}
    for read in call.inputs:
        results = yield read.producer
        if read.producer is None or results is None or draws_random_numbers(call.layer):
            return None
        known[read] = results[flatten_values(read.producer.outputs).index(read)]
    has_unknown_size = any(UNKNOWN in run for run, _ in known.values())
    if has_unknown_size and not (kind in MOVES and flatten_values(call.args[:1]) == call.inputs):
        return None
    runs = [_evaluate(call, {read: known[read][index] for read in known}) for index in (0, 1)]
    return list(zip(*runs, strict=True))


find_filled_results = functools.partial(find_results, fills=True)


def _evaluate(call: Call, known: dict[Value, NDArray[Any]]) -> list[NDArray[Any]]:
    with tf.init_scope():
        args, kwargs = map_values(lambda value: tf.constant(known[value]), (call.args, call.kwargs))
        return [np.asarray(x) for x in tf.nest.flatten(call.layer(*args, **kwargs))]


def evaluate(
    value: Value,
    facts: Facts | None = None,
    rule: Rule[Call | None, list[Runs] | None] = find_results,
) -> Runs | None:
    """Returns a tensor's values for two batch sizes, or None if they depend on data."""
    results = (facts or Facts()).find(rule, value.producer)
    if results is None or value.producer is None:
        return None
    runs = results[flatten_values(value.producer.outputs).index(value)]
    return None if any(UNKNOWN in run for run in runs) else runs


def evaluate_shape(shape: object, facts: Facts | None = None) -> list[list[int]] | None:
    """Evaluates a shape argument for each of `BATCHES`. Returns None if a size is unknown."""
    facts = facts or Facts()
    known = {value: evaluate(value, facts) for value in flatten_values(shape)}
    sizes = []
    for index in (0, 1):
        runs = {value: runs[index] for value, runs in known.items() if runs is not None}
        if len(runs) < len(known):
            return None
        sizes.append(np.ravel(tf.nest.flatten(map_values(runs.get, shape))).tolist())
    return sizes


def find_sizes(shape: object, facts: Facts | None = None) -> list[Any] | None:
    """Returns the sizes in a shape argument: [BATCH, 8] for `[tf.shape(x)[0], 8]`.

    Returns None if a size is unknown. The size of a first axis is `BATCH`. Any other size that
    varies with the batch size is -1.
    """
    both = evaluate_shape(shape, facts)
    measured = find_measured_tensors(flatten_values(shape))
    firsts = {BATCHES, *(tuple(count_rows(value)) for value in measured)}
    return both and [
        int(a) if a == b else BATCH if (a, b) in firsts else -1 for a, b in zip(*both, strict=True)
    ]


def find_size(value: Value) -> Any:
    """Returns the value of a size, such as `tf.shape(x)[1]`, or None if it is unknown.

    The size of a first axis is `BATCH`, even if the batch size is fixed.
    """
    runs = None if value.shape else evaluate(value)
    like = next(find_measured_tensors([value]), None)
    if runs is None or like is None:
        return None
    first, second = (int(run) for run in runs)
    is_first = [first, second] == count_rows(like)
    return BATCH if is_first else first if first == second else None


def find_measured_tensors(sizes: list[Value]) -> Iterator[Value]:
    """Yields each tensor `x` whose `tf.shape(x)` is used to compute `sizes`."""

    def read_sizes(size: Value) -> list[Value]:
        call = size.producer
        return [] if call is None or get_kind(call) == "shape" else call.inputs

    for size in reach(sizes, read_sizes):
        if size.producer is not None and get_kind(size.producer) == "shape":
            yield from size.producer.inputs[:1]


def count_rows(value: Value) -> list[int]:
    """Returns the size of a tensor's first axis for each batch size of `BATCHES`."""
    return [value.shape[0] or int(batch * value.rows) for batch in BATCHES]


def use_python_integers(call: Call) -> Call | None:
    """Returns a copy of a call with Python integers in place of known scalar sizes.

    Returns None if no size is known. The outputs keep the original call as their `producer`.
    """
    facts = Facts()
    runs = {value: evaluate(value, facts) for value in call.inputs if not value.shape}
    known = {value: both[0].item() for value, both in runs.items() if both and both[0] == both[1]}
    if not known:
        return None
    args, kwargs = map_values(lambda value: known.get(value, value), (call.args, call.kwargs))
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def is_example_index(value: object) -> bool:
    """Returns True if a tensor contains the index of each example: 0, 1, 2, ..."""
    if not isinstance(value, Value) or (runs := evaluate(value)) is None:
        return False
    like = next(find_measured_tensors([value]), None)
    return like is not None and all(
        run.shape[:1] == (rows,) and np.all(np.arange(rows) == run.T)
        for run, rows in zip(runs, count_rows(like), strict=True)
    )


def find_example(value: Value, facts: Facts | None = None) -> NDArray[Any] | None:
    """Returns a tensor's values for one example, or None if examples differ or are unknown."""
    runs = evaluate(value, facts, find_filled_results)
    if runs is None:
        return None
    first, *others = (row for run in runs for row in run)
    return first if all(np.array_equal(first, other) for other in others) else None


def fold_known_sizes(graph: Graph) -> Graph:
    """Replaces known size expressions by constants in the arguments of operations.

    Arguments of Keras layers are not replaced. Integers that depend on a fixed batch size are
    kept, because Keras can call the model with another batch size. `_SLICES` lists exceptions.
    """
    facts = Facts()
    known: dict[Value, Any] = {}
    has_fixed_batch = any(x.shape[0] for x in flatten_values(graph.inputs) if x.shape)
    of_batch: set[Value] = set()
    for call in graph.calls:
        values = flatten_values(call.outputs)
        runs = {value: evaluate(value, facts) for value in values}
        if not any(runs.values()):
            continue
        is_shape = get_kind(call) == "shape" and has_fixed_batch
        if is_shape or not of_batch.isdisjoint(call.inputs):
            of_batch.update(value for value in values if not value.is_float)
        known.update({v: both[0] for v, both in runs.items() if both and np.array_equal(*both)})
    if not known:
        return graph

    def fold(call: Call) -> Call:
        if not is_operation(call.layer) or known.keys() >= set(call.inputs):
            return call
        kept = set() if get_kind(call) in _SLICES else of_batch
        constants = {v: v if v in kept else _as_constant(known.get(v, v)) for v in call.inputs}
        args, kwargs = map_values(constants.__getitem__, (call.args, call.kwargs))
        return dataclasses.replace(call, args=args, kwargs=kwargs)

    return drop_unused_calls(dataclasses.replace(graph, calls=list(map(fold, graph.calls))))


def _as_constant(values: Value | NDArray[Any]) -> Any:
    if isinstance(values, Value):
        return values
    if not values.shape:
        return values.item()
    with tf.init_scope():
        return tf.constant(values)


def set_static_shapes(graph: Graph, *_: object) -> Graph:
    """Infers `shape` and `rows` of all values. Changes the values in place."""
    for _call in set_shapes_in_order(graph.calls):
        pass
    return graph


def set_shapes_in_order(calls: Iterable[Call]) -> Iterator[Call]:
    """Sets the inferred shapes and rows of each call's outputs, then yields the call.

    Outputs of operations such as `tf.reshape(x, [tf.shape(x)[0], -1, 8])` may lack static sizes.
    """
    facts = Facts()  # Inputs are evaluated only after their shapes are set.
    changed: set[Value] = set()
    for call in calls:
        values = flatten_values(call.outputs)
        is_known = not any(None in value.shape[1:] for value in call.inputs)
        can_infer = is_known or not changed.isdisjoint(call.inputs)
        if can_infer and any(None in value.shape[1:] for value in values):
            infer = _infer_reshape if get_kind(call) == "reshape" else infer_shapes
            for value, shape in zip(values, infer(call, facts), strict=False):
                value.shape = shape
            changed.update(values)
        if any(value.shape[:1] == (None,) for value in values):
            for value, rows in zip(values, _infer_rows(call, facts), strict=True):
                value.rows = rows if value.shape[:1] == (None,) else value.rows
        yield call


def _infer_rows(call: Call, facts: Facts) -> list[Fraction]:
    read = [value.rows for value in call.inputs if value.shape[:1] == (None,)]
    values, kind = flatten_values(call.outputs), get_kind(call)
    if kind == "reshape":
        x = get_argument(call, "tensor")
        sizes: Any = call.output.shape[1:]
        if x.shape[:1] == (None,) and not {None, 0} & {*x.shape[1:], *sizes}:
            return [x.rows * math.prod(x.shape[1:]) / math.prod(sizes)]
    elif kind in _CHANGES_ROWS:

        def replace(value: Value) -> tf.Tensor:
            """Returns the sizes in a value for a batch of 2, or a placeholder."""
            shape = (count_rows(value)[0], *value.shape[1:]) if value.shape else ()
            runs = None if value.is_float or None in value.shape else evaluate(value, facts)
            return _make_placeholder(None if runs is None else runs[0], shape, value.dtype)

        with contextlib.suppress(ValueError):
            firsts: list[Any] = [shape[:1] for shape in _infer_in_graph(call, replace)]
            if all(firsts) and (None,) not in firsts:
                return [Fraction(first, BATCHES[0]) for (first,) in firsts]
    return [max(read, default=Fraction(1))] * len(values)


def _infer_reshape(call: Call, facts: Facts) -> list[Shape]:
    """Return the output shape of a reshape, or [] if more than the batch size is unknown.

    The first size may be a multiple of the batch size, as in attention: [batch * heads, steps, 8].
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
    """Returns the output shapes that TensorFlow or Keras infers, or [] if they are unknown."""
    if not is_operation(call.layer):
        method = type(call.layer).compute_output_shape
        # The base class would call the layer.
        is_cheap = is_of_keras(call.layer) and method is not keras.layers.Layer.compute_output_shape
        has_one_input = len(call.args) == 1 and not flatten_values(call.kwargs)
        if not is_cheap or not has_one_input or flatten_values(call.outputs)[1:]:
            return []
        shapes = map_values(lambda value: tf.TensorShape(value.shape), call.args[0])
        return [tuple(tf.TensorShape(infer_output_shape(call.layer, shapes)))]

    def replace(value: Value) -> tf.Tensor:
        is_open = value.is_float or None in value.shape
        sizes = None if is_open else find_sizes(value, facts)
        is_known = sizes and all(isinstance(size, int) and size >= 0 for size in sizes)
        return _make_placeholder(sizes if is_known else None, value.shape, value.dtype)

    return _infer_in_graph(call, replace)


def _make_placeholder(values: ArrayLike | None, shape: Any, dtype: str) -> tf.Tensor:
    if values is None:
        return tf.compat.v1.placeholder(dtype, shape)
    return tf.constant(np.reshape(values, shape), dtype)


def _infer_in_graph(call: Call, replace: Callable[[Value], tf.Tensor]) -> list[Shape]:
    """Return the output shapes of a call in a new `FuncGraph`."""
    with tf.__internal__.FuncGraph("sizes").as_default():  # A `FuncGraph` can read constants.
        tensors = {x: replace(x) for x in call.inputs}
        args, kwargs = map_values(tensors.__getitem__, (call.args, call.kwargs))
        results = tf.nest.flatten(call.layer.call(*args, **kwargs))
    return [tuple(result.shape.as_list()) for result in results]
