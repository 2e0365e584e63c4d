"""Passes token ids as integers that a model reads as floats, as an `Input` without a type does."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.facts import reach
from keras_qat.graph.operations import (
    get_argument,
    get_kind,
    is_operation,
    moves_elements,
    read_scalar,
)
from keras_qat.helper_layers.operations import Indices, WeightTensor
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.expand_call import Expansion, expand_call, known, require, value_of
from keras_qat.lowering.expansions.movement import slice_axis

COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
SHIFTS = ("add", "subtract", "multiply")
CUTS = ("slice", "split", "unstack", "getitem")


def slice_token_ids(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces `tf.split` by slices if only some outputs are token ids, and rounds token ids.

    All outputs of one call have one type. Token ids that are cut out of an input with other values
    are quantized with it, so they are only near integers.
    """
    consumers = graph.consumers()

    def expand(call: Call) -> list[Call]:
        readers = [consumers[value] for value in flatten_values(call.outputs)]
        are_tokens = [any(map(_reads_token_ids, calls)) for calls in readers]
        function: Expansion | None = None
        if get_kind(call) in ("split", "unstack") and any(are_tokens) and not all(are_tokens):
            function = functools.partial(_slice_outputs, call)
        elif len(call.inputs) == 1 and _reads_token_ids(call):
            is_table = all(type(reader.layer) is layers.Embedding for reader in readers[0])
            is_table = type(call.layer) is layers.Embedding or (bool(readers[0]) and is_table)
            if is_table and call.inputs[0].is_float and _is_cut_from_input(call.inputs[0]):
                function = functools.partial(_round_first, call)
        parts = expand_call(call, function, context) if function else []
        return [part.as_part_of(call) for part in parts] or [call]

    return dataclasses.replace(graph, calls=[new for call in graph.calls for new in expand(call)])


def _slice_outputs(call: Call, value: Any, *_: Any, **__: Any) -> list[Any]:
    """Compute the outputs of `tf.split` or `tf.unstack` one by one."""
    axis = int(known(read_scalar(get_argument(call, "axis")))) % len(value.shape)
    is_split = get_kind(call) == "split"
    require(axis and None not in value.shape[1:])
    outputs, begin = [], 0
    for output in flatten_values(call.outputs):
        end = begin + (known(output.shape[axis]) if is_split else 1)
        part = slice_axis(value, axis, begin, end, "part")
        outputs.append(part if is_split else tf.squeeze(part, axis))
        begin = end
    return outputs


def _round_first(call: Call, x: Any, *_: Any, **__: Any) -> Any:
    """Compute a cast to integers, or an Embedding, of the integers next to token ids."""
    value_of(x)  # Other inputs than token ids are not near integers.
    rounded = tf.round(x, name="rounded")
    if is_operation(call.layer):
        return tf.cast(rounded, call.output.dtype)
    return call.layer(tf.cast(rounded, "int32", name="tokens"))


def _is_cut_from_input(x: Value) -> bool:
    """Tell whether a tensor is a part of an input of the model."""
    is_cut = False
    while (call := x.producer) is not None:
        if len(call.inputs) != 1 or get_kind(call) not in (*CUTS, *_RESHAPES):
            return False
        is_cut = get_kind(call) in CUTS
        (x,) = call.inputs
    return is_cut


_RESHAPES = ("squeeze", "reshape", "expand_dims", "identity")


def cast_token_ids(graph: Graph, context: LoweringContext) -> Graph:
    """Casts inputs to integers that only embeddings or casts to integers read.

    Operations in between that move or shift token ids compute in integers, too.
    """
    consumers, integers = graph.consumers(), dict[Value, Value]()
    tokens, calls = _find_token_ids(graph), list[Call]()
    for value in (value for value in flatten_values(graph.inputs) if value in tokens):
        parts = PartsBuilder(consumers[value][0], context)
        layer = parts.new("indices", Indices)
        integers[value] = Value(parts.path(layer), value.shape, "int32")
        parts.add(layer, value, output=integers[value])
        calls += parts.calls

    def as_integers(value: Value) -> Value:
        if value in tokens and value not in integers:
            integers[value] = Value(value.name, value.shape, "int32", masked=value.masked)
        return integers.get(value, value)

    for call in graph.calls:
        if not integers.keys().isdisjoint(call.inputs):
            args, kwargs = map_values(as_integers, (call.args, call.kwargs))
            if is_operation(call.layer):  # Integers and floats are not added.
                args, kwargs = tf.nest.map_structure(_as_integer, (args, kwargs))
            outputs = map_values(as_integers, call.outputs)
            call = Call(call.layer, args, kwargs, outputs, call.name).as_part_of(call)
        calls.append(call)
    return dataclasses.replace(graph, calls=calls)


def _as_integer(x: Any) -> Any:
    value = read_scalar(x)
    return x if value is None else int(value)


def _find_token_ids(graph: Graph) -> set[Value]:
    """Return the float inputs that are only used as token ids, and the tensors moved from them."""
    consumers, ends = graph.consumers(), set(flatten_values(graph.outputs))

    def find_moved(value: Value) -> list[Value]:
        """Return the tensors with which a tensor shares its type."""
        calls = [call for call in [value.producer, *consumers[value]] if call and _moves(call)]
        return [x for call in calls for x in [*call.inputs, *flatten_values(call.outputs)]]

    def is_token(value: Value) -> bool:
        is_moved = value.producer is None or _moves(value.producer)
        readers = [call for call in consumers[value] if not _keeps_result(call)]
        is_read = readers and all(_reads_token_ids(call) or _moves(call) for call in readers)
        return value.is_float and value not in ends and is_moved and bool(is_read)

    groups = [
        reach([value], find_moved) for value in flatten_values(graph.inputs) if value.is_float
    ]
    return {value for group in groups if all(map(is_token, group)) for value in group}


def _moves(call: Call) -> bool:
    """Tell whether a call only moves values, or shifts one tensor by an integer."""
    if get_kind(call) in SHIFTS:
        return _reads_one_integer(call)
    return moves_elements(call)


def _reads_token_ids(call: Call) -> bool:
    """Tell whether a call casts floats to integers, or is an Embedding, which does."""
    layer = call.layer
    if is_operation(layer):
        return get_kind(layer) == "cast" and call.output.dtype in ("int32", "int64")
    while type(layer) is layers.TimeDistributed:
        layer = layer.layer
    return isinstance(layer, layers.Embedding)


def _keeps_result(call: Call) -> bool:
    """Tell whether a call returns the same for integers as for floats: a shape or a comparison."""
    if type(call.layer) is WeightTensor:  # Reads no values.
        return True
    kind = get_kind(call)
    return kind == "shape" or (kind in COMPARISONS and _reads_one_integer(call))


def _reads_one_integer(call: Call) -> bool:
    """Tell whether a call reads one tensor and one integer."""
    given = [x for x in [*call.args, *call.kwargs.values()] if not isinstance(x, Value)]
    numbers = [x for x in map(read_scalar, given) if x is not None]
    return len(call.inputs) == len(numbers) == 1 and numbers[0] == int(numbers[0])
