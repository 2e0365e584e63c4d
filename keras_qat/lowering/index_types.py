"""Uses int32 after `floor`, `ceil` or `round` if the result is cast to an integer later."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.facts import Facts, reach
from keras_qat.graph.operations import MOVES, get_kind, read_array
from keras_qat.helper_layers.operations import Positions
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, suffix_of

ROUNDS = ("floor", "ceil", "round")
"""Operations that return integers for any floats."""

KEEPS_INTEGERS = MOVES.union(("add", "subtract", "multiply", "maximum", "minimum", "clip_by_value"))
"""Operations that return integers for integers."""

Values = Literal["integers", "fractions", "moved inputs", "inputs"]
"""What a float tensor holds; "inputs" if values of the model's inputs are among it."""


def find_values(value: Value) -> Generator[Value, Any, Values]:
    """Find out whether a float tensor only holds integers."""
    call = value.producer
    if call is None:
        return "moved inputs"
    kind = get_kind(call)
    if kind == "cast":
        return "fractions" if call.inputs[0].is_float else "integers"
    if kind not in ROUNDS and kind not in KEEPS_INTEGERS:
        return "fractions"
    read: dict[Value, Values] = {}
    for x in call.inputs:
        read[x] = yield x
    is_moved = all(values == "moved inputs" for values in read.values())
    if kind in ROUNDS:
        return "inputs" if is_moved else "integers"
    if kind in MOVES and is_moved:
        return "moved inputs"
    if not value.is_float or _reads_fractions(call):
        return "fractions"
    known = {values for x, values in read.items() if x.is_float}
    if not known.isdisjoint(("moved inputs", "inputs")):
        return "inputs"
    return "fractions" if "fractions" in known else "integers"


def round_indices(graph: Graph, context: LoweringContext) -> Graph:
    """Rounds to int32 at once where an integer-valued float tensor is cast to integers later.

    For example, the sum in `tf.cast(tf.floor(x) + 1, tf.int32)` has a range, whose steps are not
    integers, so the cast of 2.98 would return 2. Values of the model's inputs are not rounded,
    because the model does not know their steps.
    """
    facts, integers, calls = Facts(), dict[Value, Value](), list[Call]()
    casts = {
        call: found
        for call in graph.calls
        if get_kind(call) == "cast" and call.inputs[0].is_float
        if call.output.dtype in ("int32", "int64")
        if (found := facts.find(find_values, call.inputs[0])) in ("integers", "fractions")
    }
    of_integers = [call.inputs[0] for call, found in casts.items() if found == "integers"]
    needed = {value.producer for value in reach(of_integers, _read_integers)}
    for call in graph.calls:
        calls += _cast(call, integers, context) if call in casts else [call]
        calls += _compute_in_integers(call, integers, context) if call in needed else []
    return dataclasses.replace(graph, calls=calls)


def _read_integers(value: Value) -> list[Value]:
    """Return the tensors that have to become integers for a tensor to become integers."""
    call = value.producer
    is_start = call is None or get_kind(call) in (*ROUNDS, "cast")
    return [] if call is None or is_start else [x for x in call.inputs if x.is_float]


def _cast(call: Call, integers: Mapping[Value, Value], context: LoweringContext) -> list[Call]:
    """Return calls that cast a float tensor, or the same tensor in integers."""
    parts, (x,) = PartsBuilder(call, context), call.inputs
    if x not in integers and call.output.dtype == "int32":
        return parts.end(parts.new("", Positions, "truncate"), x)
    if x not in integers:
        layer = parts.new("truncate", Positions, "truncate")
        whole = parts.add(layer, x, output=Value(parts.path(layer), x.shape, "int32"))
    cast = parts.new("", type(call.layer), tf.cast, dtype="int32")
    return parts.end(cast, integers.get(x) or whole, kwargs={"dtype": call.output.dtype})


def _compute_in_integers(
    call: Call, integers: dict[Value, Value], context: LoweringContext
) -> list[Call]:
    """Return the calls that compute the outputs of a call as int32, which `integers` gets."""
    parts, kind = PartsBuilder(call, context), get_kind(call)
    args: Any = tuple(call.inputs)
    kwargs: Any = {}
    if kind in ROUNDS:
        layer = parts.new(kind, Positions, kind)
    elif kind == "cast":
        kwargs = {"dtype": "int32"}
        layer = parts.new("integers", type(call.layer), tf.cast, dtype="int32")
    else:
        arguments = map_values(lambda x: integers.get(x, x), (call.args, call.kwargs))
        args, kwargs = tf.nest.map_structure(_as_integer, arguments)
        layer = parts.new("whole", type(call.layer), call.layer.function, dtype="int32")
    for value in flatten_values(call.outputs):
        name = parts.path(layer) + suffix_of(value.name, call.name)
        integers[value] = Value(name, value.shape, "int32", rows=value.rows)
    parts.add(layer, *args, kwargs=kwargs, output=map_values(integers.get, call.outputs))
    return [part.as_part_of(call) for part in parts.calls]


def _reads_fractions(call: Call) -> bool:
    """Tell whether a constant among the arguments of a call is not an integer."""
    known = map(read_array, tf.nest.flatten((call.args, call.kwargs)))
    return any(np.any(values != np.round(values)) for values in known if values is not None)


def _as_integer(leaf: Any) -> Any:
    """Return a float constant as an integer, and any other argument unchanged."""
    values = read_array(leaf)
    if values is None or values.dtype.kind != "f":
        return leaf
    return values.astype(np.int32) if values.ndim else int(values)
