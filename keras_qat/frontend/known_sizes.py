"""Computes beforehand what depends on the sizes of tensors alone, such as sqrt(tf.shape(x)[-1])."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call, Graph, Value, map_values, values_in
from keras_qat.frontend.tf_operations import draws_random_numbers, is_operation

BATCH = "batch"
"""Stands for the size of the first axis, which may vary."""


def size_of(value: Value) -> Any:
    """Returns the size that an integer of a graph holds, e.g. `tf.shape(x)[1]`; None if unknown."""
    call = value.producer
    source = call.inputs[0].producer if call is not None and call.inputs else None
    if call is None or source is None or not is_operation(call.layer):
        return None
    if getattr(source.layer, "symbol", "") not in ("compat.v1.shape", "shape"):
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
    if getattr(source.layer, "symbol", "") not in ("compat.v1.shape", "shape"):
        return None
    part = call.args[1] if len(call.args) > 1 else None
    part = part[0] if isinstance(part, (list, tuple)) and len(part) == 1 else part
    if not isinstance(part, dict) or any(isinstance(end, Value) for end in part.values()):
        return None
    sizes = source.inputs[0].shape[slice(part["start"], part["stop"], part["step"])]
    known = [size for size in sizes if size is not None]
    return known if len(known) == len(sizes) else None


def computed_sizes(shape: Any) -> list[int] | None:
    """Returns the sizes in a shape that operations compute from those of tensors; None if unknown.

    Sizes that vary with that of the first axis, which is open, are -1.
    """
    with tf.init_scope():
        runs = [_with_batch(shape, batch) for batch in (2, 3)]
    if any(sizes is None or sizes.ndim != 1 for sizes in runs):
        return None
    return [int(a) if a == b else -1 for a, b in zip(*runs, strict=True)]


def _with_batch(shape: Any, batch: int) -> np.ndarray | None:
    """Returns a shape as it is with so many examples; None if it depends on anything else."""

    def number_of(value: Value) -> Any:
        call = value.producer
        if call is None or not is_operation(call.layer) or value.is_float:
            raise LookupError
        if call.layer.symbol in ("compat.v1.shape", "shape"):
            first, *sizes = call.inputs[0].shape
            if None in sizes:
                raise LookupError
            return tf.constant([batch if first is None else first, *sizes])
        args, kwargs = map_values(number_of, (call.args, call.kwargs))
        results = tf.nest.flatten(call.layer(*args, **kwargs))
        return results[values_in(call.outputs).index(value)]

    try:
        return np.asarray(map_values(number_of, shape))
    except LookupError:
        return None


def with_known_sizes(graph: Graph) -> Graph:
    """Replaces what is computed from known sizes by constants, where real numbers take part.

    Integers that are computed without real numbers stay, such as the sizes that a reshape takes,
    and so does what layers read, whose weights would be constants else.
    """
    known: dict[Value, Any] = {}
    reals: set[Value] = set()
    for call in graph.calls:
        values = values_in(call.outputs)
        size = size_of(values[0]) if len(values) == 1 else None
        if isinstance(size, int):
            known[values[0]] = np.array(size, values[0].dtype)
        elif len(values) == 1 and _is_computable(call, known):
            known[values[0]] = _computed(call, known)
            if values[0].is_float or not reals.isdisjoint(call.inputs):
                reals.add(values[0])
    if not reals:
        return graph

    def constant(value: Value) -> Any:
        return _constant(known[value]) if value in reals else value

    calls = []
    read = {*values_in(graph.outputs), *(v for call in graph.loss_only for v in call.inputs)}
    for call in reversed(graph.calls):
        values = values_in(call.outputs)
        if known.keys() >= set(values) and read.isdisjoint(values):
            continue
        if is_operation(call.layer) and not reals >= set(call.inputs):
            args, kwargs = map_values(constant, (call.args, call.kwargs))
            new = Call(call.layer, args, kwargs, call.outputs, call.name)
            call = new.as_part_of(call)
        calls.append(call)
        read.update(call.inputs)
    return dataclasses.replace(graph, calls=calls[::-1])


def _constant(number: Any) -> Any:
    """Returns a number of Python, or a tensor, as the arguments of operations hold them."""
    if not number.shape:
        return number.item()
    with tf.init_scope():
        return tf.constant(number)


def _is_computable(call: Call, known: dict[Value, Any]) -> bool:
    """Returns whether an operation reads known sizes alone, and draws no random numbers."""
    if not is_operation(call.layer) or draws_random_numbers(call.layer.symbol):
        return False
    return bool(call.inputs) and all(value in known for value in call.inputs)


def _computed(call: Call, known: dict[Value, Any]) -> Any:
    with tf.init_scope():
        args, kwargs = map_values(lambda value: tf.constant(known[value]), (call.args, call.kwargs))
        return np.asarray(call.layer(*args, **kwargs))
