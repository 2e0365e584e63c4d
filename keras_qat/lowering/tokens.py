"""Makes integers of tokens that come as real numbers, as an `Input` without a type has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, map_values, values_in
from keras_qat.graph.operations import is_operation, kind_of, moves_elements
from keras_qat.graph.tf_operations import argument, number, operation_class
from keras_qat.helper_layers.operations import Indices, WeightTensor
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder

COMPARISONS = "equal", "not_equal", "greater", "greater_equal", "less", "less_equal"

SHIFTS = "add", "subtract", "multiply"


def with_tokens_apart(graph: Graph, context: LoweringContext) -> Graph:
    """Makes slices of the parts of a split among which are tokens: one call has one type."""
    readers = graph.consumers()

    def apart(call: Call) -> list[Call]:
        kind = kind_of(call)
        outputs = values_in(call.outputs)
        are_tokens = [any(map(_takes_integers, readers[value])) for value in outputs]
        if kind not in ("split", "unstack") or not any(are_tokens) or all(are_tokens):
            return [call]
        x, axis = call.inputs[0], number(argument(call, "axis"))
        rank = len(x.shape)
        if len(call.inputs) > 1 or axis is None or not int(axis) % rank or None in x.shape[1:]:
            return [call]
        position, begin = int(axis) % rank, 0
        parts, operation = PartsBuilder(call, context), type(call.layer)
        for index, output in enumerate(outputs):
            size = 1 if kind == "unstack" else int(output.shape[position] or 0)
            begins = [begin if a == position else 0 for a in range(rank)]
            sizes = [size if a == position else -1 for a in range(rank)]
            part = parts.new(f"part_{index}", operation, tf.slice)
            begin += size
            if kind == "split":
                parts.add(part, x, begins, sizes, output=output)
                continue
            shape = [1 if a == position else n for a, n in enumerate(x.shape)]
            sliced = parts.add(part, x, begins, sizes, shape=tuple(shape))
            squeeze = parts.new(f"squeezed_{index}", operation, tf.squeeze)
            parts.add(squeeze, sliced, kwargs={"axis": position}, output=output)
        return [part.as_part_of(call) for part in parts.calls]

    def rounded(call: Call) -> list[Call]:
        """Rounds tokens that are cut out of real numbers, whose quantized values are near them."""
        if len(call.inputs) != 1 or not _takes_integers(call):
            return [call]
        x, layer, reads = call.inputs[0], call.layer, readers[call.output]
        is_table = type(layer) is layers.Embedding
        are_tokens = is_table or (reads and all(type(c.layer) is layers.Embedding for c in reads))
        if not (x.is_float and are_tokens and _is_cut(x)):
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

    calls = [new for call in graph.calls for part in apart(call) for new in rounded(part)]
    return dataclasses.replace(graph, calls=calls)


def _is_cut(x: Value) -> bool:
    """Returns whether a tensor is a part of another that the model reads."""
    call = x.producer
    if call is None or not is_operation(call.layer) or len(call.inputs) != 1:
        return False
    is_part = kind_of(call) in ("slice", "split", "unstack", "getitem")
    is_move = kind_of(call) in ("squeeze", "reshape", "expand_dims", "identity")
    source = call.inputs[0]
    return (is_part and source.producer is None) or ((is_part or is_move) and _is_cut(source))


def tokens_as_integers(graph: Graph, context: LoweringContext) -> Graph:
    """Casts inputs once that embeddings or casts to integers read, and nothing computes with.

    What cuts, joins, turns and shifts them in between is of integers, too.
    """
    readers, integers = graph.consumers(), dict[Value, Value]()
    tokens, calls = _tokens(graph), list[Call]()
    for value in (value for value in values_in(graph.inputs) if value in tokens):
        parts = PartsBuilder(readers[value][0], context)
        layer = parts.new("indices", Indices)
        integers[value] = Value(parts.path(layer), value.shape, "int32")
        parts.add(layer, value, output=integers[value])
        calls += parts.calls

    def moved(value: Value) -> Value:
        if value in tokens:
            integers[value] = Value(value.name, value.shape, "int32", masked=value.masked)
        return integers.get(value, value)

    def with_tokens(call: Call) -> Call:
        if integers.keys().isdisjoint(call.inputs):
            return call
        args, kwargs = map_values(
            lambda value: integers.get(value, value), (call.args, call.kwargs)
        )
        if is_operation(call.layer):  # No number may be real beside integers.
            args, kwargs = tf.nest.map_structure(_whole, (args, kwargs))
        outputs = map_values(moved, call.outputs)
        return Call(call.layer, args, kwargs, outputs, call.name).as_part_of(call)

    return dataclasses.replace(graph, calls=calls + list(map(with_tokens, graph.calls)))


def _whole(x: Any) -> Any:
    value = number(x)
    return x if value is None else int(value)


def _tokens(graph: Graph) -> set[Value]:
    """Returns the inputs of real numbers that are tokens alone, and what is moved of them."""
    readers, ends = graph.consumers(), set(values_in(graph.outputs))
    inputs = values_in(graph.inputs)
    moves = {call: values_in(call.outputs) for call in graph.calls if _moves(call)}
    tokens = {value for values in [inputs, *moves.values()] for value in values if value.is_float}
    before, tokens = set[Value](), tokens - ends
    while before != tokens:
        before = set(tokens)
        moving = {call for call, ys in moves.items() if tokens.issuperset([*ys, *call.inputs])}
        tokens = {
            value
            for value in tokens
            if (value.producer is None or value.producer in moving)
            and any(_takes_integers(call) or call in moving for call in readers[value])
            and all(
                _takes_integers(call) or _keeps_integers(call) or call in moving
                for call in readers[value]
            )
        }
    return tokens


def _moves(call: Call) -> bool:
    """Returns whether a call cuts, joins or turns tensors alone, or adds a whole number to one."""
    if kind_of(call) in SHIFTS:
        return _has_whole_number(call)
    return moves_elements(call)


def _takes_integers(call: Call) -> bool:
    """Returns whether a call casts real numbers to integers, or is an Embedding, which does."""
    layer = call.layer
    if is_operation(layer):
        return kind_of(layer) == "cast" and call.output.dtype in ("int32", "int64")
    while type(layer) is layers.TimeDistributed:
        layer = layer.layer
    return isinstance(layer, layers.Embedding)


def _keeps_integers(call: Call) -> bool:
    """Returns whether a call computes the same of integers: a shape, or a comparison with one."""
    if type(call.layer) is WeightTensor:  # Reads no numbers.
        return True
    kind = kind_of(call)
    return kind == "shape" or (kind in COMPARISONS and _has_whole_number(call))


def _has_whole_number(call: Call) -> bool:
    """Returns whether a call reads one tensor and one whole number."""
    given = [x for x in [*call.args, *call.kwargs.values()] if not isinstance(x, Value)]
    numbers = [x for x in map(number, given) if x is not None]
    return len(call.inputs) == len(numbers) == 1 and numbers[0] == int(numbers[0])
