"""Evaluates what depends on the sizes of tensors alone, such as `sqrt(tf.shape(x)[-1])`.

Each expression is evaluated for two batch sizes. What is equal for both is a constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, drop_unused_calls, flatten_values, map_values
from keras_qat.graph.facts import Facts, reach
from keras_qat.graph.operations import MOVES, draws_random_numbers, get_kind, is_operation

SLICES_AND_SEGMENTS = (
    *("getitem", "slice", "strided_slice"),
    *(f"unsorted_segment_{kind}" for kind in ("sum", "mean", "sqrt_n", "max", "min")),
)
"""Operations whose arguments may depend on a fixed batch size, such as all nodes of one graph."""

BATCHES = 2, 61
"""Two batch sizes, far apart."""

BATCH = "batch"
"""Stands for the size of the first axis, which may vary."""

UNKNOWN = int(np.iinfo(np.int32).min)
"""Stands for an unknown size in a shape of which other sizes are known."""

FILLS = {"ones_like": 1, "zeros_like": 0}
"""Operation that makes a tensor of the shape of another one -> its value."""

Runs = tuple[np.ndarray, np.ndarray]
"""A tensor's values for the two batch sizes."""


def find_results(
    call: Call | None, fills: bool = False
) -> Generator[Call | None, Any, list[Runs] | None]:
    """Evaluate the outputs of a call for two batch sizes, if they depend on sizes alone.

    Args:
        call: the call.
        fills: whether to fill tensors that are as large as those of the model, for `ones_like`.
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


def find_filled_results(call: Call | None) -> Generator[Call | None, Any, list[Runs] | None]:
    """Evaluate a call like `find_results`, and `ones_like` of any tensor."""
    return find_results(call, fills=True)


def _evaluate(call: Call, known: dict[Value, np.ndarray]) -> list[np.ndarray]:
    with tf.init_scope():
        args, kwargs = map_values(lambda value: tf.constant(known[value]), (call.args, call.kwargs))
        return [np.asarray(x) for x in tf.nest.flatten(call.layer(*args, **kwargs))]


def evaluate(value: Value, facts: Facts | None = None, rule: Any = find_results) -> Runs | None:
    """Return a tensor's values for two batch sizes; None if they depend on more than sizes."""
    results = (facts or Facts()).find(rule, value.producer)
    if results is None or value.producer is None:
        return None
    runs: Runs = results[flatten_values(value.producer.outputs).index(value)]
    return None if any(UNKNOWN in run for run in runs) else runs


def evaluate_shape(shape: Any, facts: Facts | None = None) -> list[list[int]] | None:
    """Return the sizes in a shape for each of `BATCHES`; None if unknown."""
    facts = facts or Facts()
    known = {value: evaluate(value, facts) for value in flatten_values(shape)}
    sizes = []
    for index in (0, 1):
        runs = {value: runs[index] for value, runs in known.items() if runs is not None}
        if len(runs) < len(known):
            return None
        sizes.append(np.ravel(tf.nest.flatten(map_values(runs.get, shape))).tolist())
    return sizes


def find_sizes(shape: Any, facts: Facts | None = None) -> list[Any] | None:
    """Return the sizes in a shape that operations compute from sizes of tensors; None if unknown.

    The size of a first axis is `BATCH`, and other sizes that vary with it are -1.
    """
    both = evaluate_shape(shape, facts)
    firsts = {
        BATCHES,
        *(tuple(count_rows(value)) for value in find_measured_tensors(flatten_values(shape))),
    }
    return both and [
        int(a) if a == b else BATCH if (a, b) in firsts else -1 for a, b in zip(*both, strict=True)
    ]


def find_known_sizes(shape: Any, facts: Facts | None = None) -> list[int] | None:
    """Return the sizes in a shape that are the same for all batch sizes; None if any is unknown."""
    sizes = find_sizes(shape, facts)
    is_known = sizes and all(isinstance(size, int) and size >= 0 for size in sizes)
    return sizes if is_known else None


def find_size(value: Value) -> Any:
    """Return the size that an integer holds, e.g. `tf.shape(x)[1]`; None if unknown.

    The size of a first axis is `BATCH`, also if it is fixed.
    """
    runs = None if value.shape else evaluate(value)
    like = next(find_measured_tensors([value]), None)
    if runs is None or like is None:
        return None
    sizes = [int(run) for run in runs]
    is_first = sizes == count_rows(like)
    return BATCH if is_first else sizes[0] if sizes[0] == sizes[1] else None


def find_measured_tensors(sizes: list[Value]) -> Iterator[Value]:
    """Yield the tensors whose shapes these sizes are computed from."""

    def read_sizes(size: Value) -> list[Value]:
        call = size.producer
        return [] if call is None or get_kind(call) == "shape" else call.inputs

    for size in reach(sizes, read_sizes):
        if size.producer is not None and get_kind(size.producer) == "shape":
            yield from size.producer.inputs[:1]


def count_rows(value: Value) -> list[int]:
    """Return the size of a tensor's first axis for each of `BATCHES`."""
    return [value.shape[0] or int(batch * value.rows) for batch in BATCHES]


def use_python_integers(call: Call) -> Call | None:
    """Return a call that reads Python's numbers in place of integers that depend on sizes alone.

    None if it reads no such integers. Readers of its outputs still see the original call.
    """
    facts = Facts()
    runs = {value: evaluate(value, facts) for value in call.inputs if not value.shape}
    known = {value: both[0].item() for value, both in runs.items() if both and both[0] == both[1]}
    if not known:
        return None
    args, kwargs = map_values(lambda value: known.get(value, value), (call.args, call.kwargs))
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def counts_examples(value: Any) -> bool:
    """Tell whether a tensor holds the index of each example, from 0 on, and nothing else."""
    runs = evaluate(value) if isinstance(value, Value) else None
    like = next(find_measured_tensors([value]), None) if runs else None
    if runs is None or like is None:
        return False
    return all(
        run.shape[:1] == (rows,) and np.all(np.arange(rows) == run.T)
        for run, rows in zip(runs, count_rows(like), strict=True)
    )


def find_example(value: Value, facts: Facts | None = None) -> np.ndarray | None:
    """Return what a tensor holds for each example; None if that depends on more than sizes."""
    runs = evaluate(value, facts, find_filled_results)
    if runs is None:
        return None
    first, *others = (row for run in runs for row in run)
    return first if all(np.array_equal(first, other) for other in others) else None


def fold_known_sizes(graph: Graph) -> Graph:
    """Replaces what is computed from known sizes by constants in what operations read.

    What layers read stays, as their weights would be constants else. So do integers that depend on
    a fixed batch size, but for slices and segments: such models take other batches, too.
    """
    facts = Facts()
    known: dict[Value, Any] = {}
    has_fixed_batch = any(value.shape[0] for value in flatten_values(graph.inputs) if value.shape)
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

    def with_constants(call: Call) -> Call:
        if not is_operation(call.layer) or known.keys() >= set(call.inputs):
            return call
        kept = set() if get_kind(call) in SLICES_AND_SEGMENTS else of_batch
        constants = {v: v if v in kept else _constant(known.get(v, v)) for v in call.inputs}
        args, kwargs = map_values(constants.__getitem__, (call.args, call.kwargs))
        return dataclasses.replace(call, args=args, kwargs=kwargs)

    calls = list(map(with_constants, graph.calls))
    return drop_unused_calls(dataclasses.replace(graph, calls=calls))


def _constant(values: Any) -> Any:
    """Return a Python number, or a tensor, as the arguments of operations hold them."""
    if isinstance(values, Value):
        return values
    if not values.shape:
        return values.item()
    with tf.init_scope():
        return tf.constant(values)
