"""Passes token ids as integers that a model reads as floats, as an `Input` without a type does."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, map_values, values_in
from keras_qat.graph.facts import reach
from keras_qat.graph.operations import is_operation, kind_of, moves_elements
from keras_qat.graph.tf_operations import argument, number, operation_class
from keras_qat.helper_layers.operations import Indices, WeightTensor
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder

COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
SHIFTS = ("add", "subtract", "multiply")
CUTS = ("slice", "split", "unstack", "getitem")


def slice_token_ids(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces `tf.split` by slices if only some outputs are token ids, and rounds token ids.

    All outputs of one call have one type. Token ids that are cut out of an input with other values
    are quantized with it, so they are only near integers.
    """
    consumers = graph.consumers()
    calls = []
    for call in graph.calls:
        for part in _slice_outputs(call, consumers, context):
            calls += _round_tokens(part, consumers, context)
    return dataclasses.replace(graph, calls=calls)


def _slice_outputs(
    call: Call, consumers: dict[Value, list[Call]], context: LoweringContext
) -> list[Call]:
    """Returns slices in place of a split of which only some outputs are token ids."""
    kind, outputs = kind_of(call), values_in(call.outputs)
    are_tokens = [any(map(_reads_token_ids, consumers[value])) for value in outputs]
    if kind not in ("split", "unstack") or not any(are_tokens) or all(are_tokens):
        return [call]
    x, axis = call.inputs[0], number(argument(call, "axis"))
    rank = len(x.shape)
    if len(call.inputs) > 1 or axis is None or not int(axis) % rank or None in x.shape[1:]:
        return [call]
    position, begin = int(axis) % rank, 0
    parts, operation = PartsBuilder(call, context), type(call.layer)
    for index, output in enumerate(outputs):
        if kind == "split":
            size = int(output.shape[position] or 0)
            parts.slice(f"part_{index}", x, position, begin, begin + size, output)
        else:
            size = 1
            sliced = parts.slice(f"part_{index}", x, position, begin, begin + 1)
            squeeze = parts.new(f"squeezed_{index}", operation, tf.squeeze)
            parts.add(squeeze, sliced, kwargs={"axis": position}, output=output)
        begin += size
    return [part.as_part_of(call) for part in parts.calls]


def _round_tokens(
    call: Call, consumers: dict[Value, list[Call]], context: LoweringContext
) -> list[Call]:
    """Returns calls that round token ids first, if they are cut out of a float input."""
    if len(call.inputs) != 1 or not _reads_token_ids(call):
        return [call]
    x, layer, readers = call.inputs[0], call.layer, consumers[call.output]
    is_table = type(layer) is layers.Embedding
    are_tokens = is_table or (readers and all(type(c.layer) is layers.Embedding for c in readers))
    if not (x.is_float and are_tokens and _is_cut_from_input(x)):
        return [call]
    parts, operation = PartsBuilder(call, context), operation_class()
    y = parts.add(parts.new("rounded", operation, tf.round), x, shape=x.shape)
    if not is_table:
        return parts.end(parts.new("", operation, tf.cast), y, call.output.dtype)
    cast = parts.new("tokens", operation, tf.cast, dtype="int32")
    tokens = Value(parts.path(cast), x.shape, "int32")
    parts.add(cast, y, "int32", output=tokens)
    parts.calls.append(Call(layer, (tokens,), {}, call.outputs, call.name))
    return [part.as_part_of(call) for part in parts.calls]


def _is_cut_from_input(x: Value) -> bool:
    """Tell whether a tensor is a part of an input of the model."""
    is_cut = False
    while (call := x.producer) is not None:
        if len(call.inputs) != 1 or kind_of(call) not in (*CUTS, *_RESHAPES):
            return False
        is_cut = kind_of(call) in CUTS
        (x,) = call.inputs
    return is_cut


_RESHAPES = ("squeeze", "reshape", "expand_dims", "identity")


def cast_token_ids(graph: Graph, context: LoweringContext) -> Graph:
    """Casts inputs to integers that only embeddings or casts to integers read.

    Operations in between that move or shift token ids compute in integers, too.
    """
    consumers, integers = graph.consumers(), dict[Value, Value]()
    tokens, calls = _find_token_ids(graph), list[Call]()
    for value in (value for value in values_in(graph.inputs) if value in tokens):
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
    value = number(x)
    return x if value is None else int(value)


def _find_token_ids(graph: Graph) -> set[Value]:
    """Return the float inputs that are only used as token ids, and the tensors moved from them."""
    consumers, ends = graph.consumers(), set(values_in(graph.outputs))

    def find_moved(value: Value) -> list[Value]:
        """Return the tensors with which a tensor shares its type."""
        calls = [call for call in [value.producer, *consumers[value]] if call and _moves(call)]
        return [x for call in calls for x in [*call.inputs, *values_in(call.outputs)]]

    def is_token(value: Value) -> bool:
        is_moved = value.producer is None or _moves(value.producer)
        readers = [call for call in consumers[value] if not _keeps_result(call)]
        is_read = readers and all(_reads_token_ids(call) or _moves(call) for call in readers)
        return value.is_float and value not in ends and is_moved and bool(is_read)

    groups = [reach([value], find_moved) for value in values_in(graph.inputs) if value.is_float]
    return {value for group in groups if all(map(is_token, group)) for value in group}


def _moves(call: Call) -> bool:
    """Tell whether a call only moves values, or shifts one tensor by an integer."""
    if kind_of(call) in SHIFTS:
        return _reads_one_integer(call)
    return moves_elements(call)


def _reads_token_ids(call: Call) -> bool:
    """Tell whether a call casts floats to integers, or is an Embedding, which does."""
    layer = call.layer
    if is_operation(layer):
        return kind_of(layer) == "cast" and call.output.dtype in ("int32", "int64")
    while type(layer) is layers.TimeDistributed:
        layer = layer.layer
    return isinstance(layer, layers.Embedding)


def _keeps_result(call: Call) -> bool:
    """Tell whether a call returns the same for integers as for floats: a shape or a comparison."""
    if type(call.layer) is WeightTensor:  # Reads no values.
        return True
    kind = kind_of(call)
    return kind == "shape" or (kind in COMPARISONS and _reads_one_integer(call))


def _reads_one_integer(call: Call) -> bool:
    """Tell whether a call reads one tensor and one integer."""
    given = [x for x in [*call.args, *call.kwargs.values()] if not isinstance(x, Value)]
    numbers = [x for x in map(number, given) if x is not None]
    return len(call.inputs) == len(numbers) == 1 and numbers[0] == int(numbers[0])
