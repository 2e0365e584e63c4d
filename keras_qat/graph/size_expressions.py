"""Computes beforehand what depends on the sizes of tensors alone, such as sqrt(tf.shape(x)[-1])."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, map_values, values_in
from keras_qat.graph.tf_operations import draws_random_numbers, is_operation, symbol_of

SHAPES = ("compat.v1.shape", "shape")

OF_BATCHES = (
    *("__operators__.getitem", "slice", "strided_slice"),
    *(f"math.unsorted_segment_{kind}" for kind in ("sum", "mean", "sqrt_n", "max", "min")),
)
"""Operations that may take numbers of a fixed batch, such as all nodes of one graph."""

RANKS = ("compat.v1.rank", "rank")

BATCHES = 2, 61
"""Numbers of examples, far apart: what is the same with both depends on other sizes alone."""

BATCH = "batch"
"""Stands for the size of the first axis, which may vary."""


def size_of(value: Value) -> Any:
    """Returns the size that an integer of a graph holds, e.g. `tf.shape(x)[1]`; None if unknown."""
    call = value.producer
    source = call.inputs[0].producer if call is not None and call.inputs else None
    if call is None or source is None or not is_operation(call.layer):
        return None
    if getattr(source.layer, "symbol", "") not in SHAPES:
        return None
    if call.layer.symbol == "unstack":
        axis = values_in(call.outputs).index(value)
    else:
        indices = [a for a in tf.nest.flatten(call.args[1:]) if isinstance(a, int)]
        (axis,) = indices if len(indices) == 1 else [len(source.inputs[0].shape)]
    shape = source.inputs[0].shape
    axis = axis + len(shape) if axis < 0 else axis
    if value.shape or not 0 <= axis < len(shape):
        return None
    return BATCH if axis == 0 else shape[axis]


def sizes_of(value: Any) -> list[int] | None:
    """Returns the sizes that a slice of a shape holds, e.g. `tf.shape(x)[1:3]`; None if unknown."""
    call = value.producer if isinstance(value, Value) else None
    source = call.inputs[0].producer if call is not None and call.inputs else None
    if call is None or source is None or not is_operation(call.layer):
        return None
    if getattr(source.layer, "symbol", "") not in SHAPES:
        return None
    part = call.args[1] if len(call.args) > 1 else None
    part = part[0] if isinstance(part, (list, tuple)) and len(part) == 1 else part
    if not isinstance(part, dict) or any(isinstance(end, Value) for end in part.values()):
        return None
    sizes = source.inputs[0].shape[slice(part["start"], part["stop"], part["step"])]
    known = [size for size in sizes if size is not None]
    return known if len(known) == len(sizes) else None


def computed_sizes(shape: Any) -> list[Any] | None:
    """Returns the sizes in a shape that operations compute from those of tensors; None if unknown.

    The size of a first axis is `BATCH`, and what else varies with it is -1.
    """
    both = sizes_in_both_runs(shape)
    firsts = {BATCHES, *(tuple(rows_of(value)) for value in measured(values_in(shape)))}
    return both and [
        int(a) if a == b else BATCH if (a, b) in firsts else -1 for a, b in zip(*both, strict=True)
    ]


def measured(sizes: list[Value]) -> Iterator[Value]:
    """Yields the tensors whose sizes are read by what computes these."""
    left, seen = list(reversed(sizes)), set[Value]()
    while left:
        size = left.pop()
        call = size.producer
        if call is None or size in seen:
            continue
        seen.add(size)
        if getattr(call.layer, "symbol", "") in SHAPES:
            yield from call.inputs[:1]
        else:
            left.extend(reversed(call.inputs))


def sizes_in_both_runs(shape: Any) -> list[list[int]] | None:
    """Returns the sizes in a shape with each number of `BATCHES`; None if unknown."""
    needed = values_in(shape)
    runs = _runs_of(needed)
    if not all(value in runs for value in needed):
        return None
    numbers = [map_values({v: runs[v][run] for v in needed}.get, shape) for run in (0, 1)]
    return [np.ravel(tf.nest.flatten(sizes)).tolist() for sizes in numbers]


def given_numbers(call: Call) -> Call | None:
    """Returns a call that is given Python's numbers for integers that depend on sizes alone.

    None if it reads none of these, as most calls. Who reads what it computes sees the call itself.
    """
    scalars = [value for value in call.inputs if not value.shape]
    runs = _runs_of(scalars)
    known = [value for value in scalars if value in runs and runs[value][0] == runs[value][1]]
    numbers = {value: runs[value][0].item() for value in known}
    if not numbers:
        return None
    args, kwargs = map_values(lambda value: numbers.get(value, value), (call.args, call.kwargs))
    given = Call(call.layer, args, kwargs, (), call.name).as_part_of(call)
    given.outputs = call.outputs
    return given


def counts_examples(value: Any) -> bool:
    """Returns whether a tensor holds the number of each example, from 0 on, and nothing else."""
    if not isinstance(value, Value) or value not in (runs := _runs_of([value])):
        return False
    like = next(measured([value]), None)
    return like is not None and all(
        run.shape[:1] == (rows,) and np.all(np.arange(rows) == run.T)
        for run, rows in zip(runs[value], rows_of(like), strict=True)
    )


def example_of(value: Value) -> np.ndarray | None:
    """Returns what a tensor holds for each example; None if that depends on more than sizes."""
    if value not in (runs := _runs_of([value], of_all=True)):
        return None
    first, *others = (row for run in runs[value] for row in run)
    return first if all(np.array_equal(first, other) for other in others) else None


LIKE = {"ones_like": 1, "zeros_like": 0}
"""Operation that makes a tensor of the shape of another one -> what it holds."""


def _runs_of(values: list[Value], of_all: bool = False) -> dict[Value, tuple[Any, Any]]:
    """Returns what integers that depend on sizes alone are with both numbers of examples.

    That may be asked `of_all` values, not of integers alone.
    """
    runs: dict[Value, tuple[Any, Any]] = {}
    seen: set[Value] = set()

    def compute(value: Value) -> None:
        call = value.producer
        if call is None or value in seen or (value.is_float and not of_all):
            return
        seen.add(value)
        symbol = symbol_of(call.layer)
        if of_all and symbol in LIKE and None not in value.shape[1:]:
            sizes: Any = value.shape[1:]
            of_two, of_many = (np.full([n, *sizes], LIKE[symbol], value.dtype) for n in BATCHES)
            runs[value] = of_two, of_many
            return
        for read in call.inputs:
            compute(read)
        if (both := _in_both_runs(call, runs)) is not None:
            runs.update(zip(values_in(call.outputs), both, strict=True))

    for value in values:
        compute(value)
    return runs


def with_known_sizes(graph: Graph) -> Graph:
    """Replaces what is computed from known sizes by constants in what operations read.

    What layers read stays, as their weights would be constants else. So do integers that depend on
    a fixed batch size, but for slices and segments: such models take other batches, too.
    """
    runs: dict[Value, tuple[Any, Any]] = {}
    """Values that depend on sizes alone -> what they are with both numbers of examples."""
    known: dict[Value, Any] = {}
    has_fixed_batch = any(value.shape[0] for value in values_in(graph.inputs) if value.shape)
    of_batch: set[Value] = set()
    for call in graph.calls:
        values = values_in(call.outputs)
        if (both := _in_both_runs(call, runs)) is None:
            continue
        is_shape = call.layer.symbol in SHAPES and has_fixed_batch
        if is_shape or not of_batch.isdisjoint(call.inputs):
            of_batch.update(value for value in values if not value.is_float)
        runs.update(zip(values, both, strict=True))
        known.update({v: runs[v][0] for v in values if np.array_equal(*runs[v])})
    if not known:
        return graph
    calls = []
    read = {*values_in(graph.outputs), *(v for call in graph.loss_only for v in call.inputs)}
    for call in reversed(graph.calls):
        values = values_in(call.outputs)
        if known.keys() >= set(values) and read.isdisjoint(values):
            continue
        if is_operation(call.layer) and not known.keys() >= set(call.inputs):
            kept = set() if call.layer.symbol in OF_BATCHES else of_batch
            constants = {v: v if v in kept else _constant(known.get(v, v)) for v in call.inputs}
            args, kwargs = map_values(constants.__getitem__, (call.args, call.kwargs))
            new = Call(call.layer, args, kwargs, call.outputs, call.name)
            call = new.as_part_of(call)
        calls.append(call)
        read.update(call.inputs)
    return dataclasses.replace(graph, calls=calls[::-1])


def _constant(number: Any) -> Any:
    """Returns a number of Python, or a tensor, as the arguments of operations hold them."""
    if isinstance(number, Value):
        return number
    if not number.shape:
        return number.item()
    with tf.init_scope():
        return tf.constant(number)


def _in_both_runs(
    call: Call, runs: Mapping[Value, tuple[Any, Any]]
) -> list[tuple[Any, Any]] | None:
    """Returns the outputs of a call that depends on sizes alone, with both numbers of examples.

    None for other calls, and for those that draw random numbers.
    """
    if not is_operation(call.layer):
        return None
    size = size_of(call.output) if len(values_in(call.outputs)) == 1 else None
    if isinstance(size, int):
        return [(np.array(size, call.output.dtype),) * 2]
    if call.layer.symbol in RANKS and call.inputs[0].shape:
        return [(np.array(len(call.inputs[0].shape), np.int32),) * 2]
    source = call.inputs[0].producer if size == BATCH else None
    if source is not None and source.inputs[0].shape[:1] == (None,):  # Others may be open, too.
        of_two, of_many = (np.array(rows, call.output.dtype) for rows in rows_of(source.inputs[0]))
        return [(of_two, of_many)]
    if call.layer.symbol in SHAPES:
        x = call.inputs[0]
        if None in x.shape[1:] or not x.shape:
            return None
        shapes = [np.array([rows, *x.shape[1:]], call.output.dtype) for rows in rows_of(x)]
        return [(shapes[0], shapes[1])]
    is_known = call.inputs and all(value in runs for value in call.inputs)
    if not is_known or draws_random_numbers(call.layer.symbol):
        return None
    results = [_computed(call, {v: runs[v][index] for v in call.inputs}) for index in (0, 1)]
    return list(zip(*results, strict=True))


def rows_of(value: Value) -> list[int]:
    """Returns the size of a tensor's first axis with each number of `BATCHES`."""
    return [value.shape[0] or int(batch * value.rows) for batch in BATCHES]


def _computed(call: Call, known: Mapping[Value, Any]) -> list[Any]:
    with tf.init_scope():
        args, kwargs = map_values(lambda value: tf.constant(known[value]), (call.args, call.kwargs))
        return [np.asarray(x) for x in tf.nest.flatten(call.layer(*args, **kwargs))]
