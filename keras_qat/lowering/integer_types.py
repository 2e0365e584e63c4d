"""Converts float token ids and int64 constants to int32.

Token ids are the input of an Embedding. They are floats if the model's `Input` has no dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.facts import Facts, reach
from keras_qat.graph.operations import (
    call_function,
    get_argument,
    get_kind,
    get_operands,
    is_operation,
    moves_elements,
    read_array,
    read_scalar,
)
from keras_qat.helper_layers.operations import Indices, WeightTensor
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, rewrite_calls
from keras_qat.lowering.expand_call import (
    Expansion,
    expand_call,
    get_value,
    is_tensor,
    require,
    unwrap,
)
from keras_qat.lowering.expansions.movement import slice_axis

COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
SHIFTS = ("add", "subtract", "multiply")
CUTS = ("slice", "split", "unstack", "getitem")
_RESHAPES = ("squeeze", "reshape", "expand_dims", "identity")

TYPED = {
    **dict.fromkeys(("tile", "repeat", "broadcast_to"), ("input",)),
    "gather": ("params",),
    "fill": ("value",),
    "where": ("x", "y"),
}
"""Maps an operation to the names of arguments that have the same dtype as the result."""


def slice_token_ids(graph: Graph, context: LoweringContext) -> Graph:
    """Separate token ids from other values in the same input of the model.

    A `tf.split` becomes one slice for each output. Slices with token ids are rounded to integers,
    because the quantized input only has multiples of its scale.
    """
    consumers, facts = graph.consumers(), Facts()

    def expand(call: Call) -> list[Call]:
        readers = [consumers[value] for value in flatten_values(call.outputs)]
        are_tokens = [any(map(_reads_token_ids, calls)) for calls in readers]
        function: Expansion | None = None
        if get_kind(call) in ("split", "unstack") and any(are_tokens) and not all(are_tokens):
            function = functools.partial(_slice_outputs, call)
        elif len(call.inputs) == 1 and _reads_token_ids(call):
            (x,) = call.inputs
            is_table = type(call.layer) is layers.Embedding
            if not is_table and readers[0]:
                is_table = all(type(reader.layer) is layers.Embedding for reader in readers[0])
            if is_table and x.is_float and facts.find(is_cut_from_input, x):
                function = functools.partial(_round_first, call)
        parts = expand_call(call, function, context) if function else []
        return [part.as_part_of(call) for part in parts]

    return rewrite_calls(graph, expand)


def _slice_outputs(call: Call, value: tf.Tensor, *_: object, **__: object) -> list[tf.Tensor]:
    axis = int(unwrap(read_scalar(get_argument(call, "axis")))) % len(value.shape)
    is_split = get_kind(call) == "split"
    require(axis and None not in value.shape[1:])
    outputs, begin = [], 0
    for output in flatten_values(call.outputs):
        end = begin + (unwrap(output.shape[axis]) if is_split else 1)
        part = slice_axis(value, axis, begin, end, "part")
        outputs.append(part if is_split else tf.squeeze(part, axis))
        begin = end
    return outputs


def _round_first(call: Call, x: tf.Tensor, *_: object, **__: object) -> tf.Tensor:
    """Round token ids to integers before `call`, an Embedding or a cast to integers."""
    get_value(x)  # No test on random inputs, which are not near integers.
    rounded = tf.round(x, name="rounded")
    if is_operation(call.layer):
        return tf.cast(rounded, call.output.dtype)
    return call.layer(tf.cast(rounded, "int32", name="tokens"))


def is_cut_from_input(value: Value) -> Generator[Value, Any, bool]:
    """Return True if a tensor is a slice of a model's input. Called by `Facts.find`."""
    call = value.producer
    if call is None or len(call.inputs) != 1 or get_kind(call) not in (*CUTS, *_RESHAPES):
        return False
    (x,) = call.inputs
    return (yield x) if x.producer is not None else get_kind(call) in CUTS


def cast_token_ids(graph: Graph, context: LoweringContext) -> Graph:
    """Cast float inputs to int32 if all of their consumers are embeddings or casts to integers.

    Operations between an input and an embedding, such as `x + 1`, then compute in integers.
    """
    consumers, integers = graph.consumers(), dict[Value, Value]()
    tokens, calls = _find_token_ids(graph), list[Call]()
    for value in (value for value in flatten_values(graph.inputs) if value in tokens):
        parts = PartsBuilder(consumers[value][0], context)
        layer = parts.new("indices", Indices)
        integers[value] = Value(parts.path(layer), value.shape, "int32")
        parts.add(layer, value, output=integers[value])
        calls += parts.calls

    def find_integers(value: Value) -> Value:
        if value in tokens and value not in integers:
            integers[value] = Value(value.name, value.shape, "int32", masked=value.masked)
        return integers.get(value, value)

    for call in graph.calls:
        if not integers.keys().isdisjoint(call.inputs):
            args, kwargs = map_values(find_integers, (call.args, call.kwargs))
            if is_operation(call.layer):  # TensorFlow cannot add integers and floats.
                args, kwargs = tf.nest.map_structure(_to_integer, (args, kwargs))
            outputs = map_values(find_integers, call.outputs)
            call = Call(call.layer, args, kwargs, outputs, call.name).as_part_of(call)
        calls.append(call)
    return dataclasses.replace(graph, calls=calls)


def _find_token_ids(graph: Graph) -> set[Value]:
    """Return the float inputs that are token ids, and all tensors between them and embeddings."""
    consumers, ends = graph.consumers(), set(flatten_values(graph.outputs))

    def find_moved(value: Value) -> list[Value]:
        """Return all tensors that a reshape or the like (see `_moves`) connects with `value`."""
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
    """Return True if token ids stay token ids, as in `tf.reshape(x, [-1])` or `x + 1`."""
    if get_kind(call) in SHIFTS:
        return _reads_one_integer(call)
    return moves_elements(call)


def _reads_token_ids(call: Call) -> bool:
    layer = call.layer
    if is_operation(layer):
        return get_kind(layer) == "cast" and call.output.dtype in ("int32", "int64")
    while type(layer) is layers.TimeDistributed:
        layer = layer.layer
    return isinstance(layer, layers.Embedding)


def _keeps_result(call: Call) -> bool:
    """Return True if integers and floats have the same result, as in `tf.shape(x)` or `x > 0`."""
    if type(call.layer) is WeightTensor:  # It ignores the values of its input.
        return True
    kind = get_kind(call)
    return kind == "shape" or (kind in COMPARISONS and _reads_one_integer(call))


def _reads_one_integer(call: Call) -> bool:
    """Return True for a call such as `x + 1`, with one tensor and one constant integer."""
    given = [x for x in [*call.args, *call.kwargs.values()] if not isinstance(x, Value)]
    constants = [x for x in map(read_scalar, given) if x is not None]
    return len(call.inputs) == len(constants) == 1 and constants[0].is_integer()


def _to_integer(leaf: object) -> object:
    values = read_array(leaf)
    if values is None or values.dtype.kind != "f":
        return leaf
    return values.astype(np.int32) if values.ndim else int(values)


def narrow_constants(call: Call, context: LoweringContext) -> list[Call]:
    """Compute an operation on int64 constants in int32, and cast the result to int64.

    Keras saves NumPy constants without their dtype. Without the cast, the operation would return
    int32 after the model is saved and loaded.
    """
    typed = TYPED.get(get_kind(call), ())
    if not typed or call.output.dtype != "int64":
        return []
    if any(isinstance(x, Value) for x in get_operands(call, *typed)):
        return []
    return expand_call(call, functools.partial(_cast_from_int32, call), context)


def _cast_from_int32(call: Call, *args: Any, **kwargs: Any) -> tf.Tensor:
    args, kwargs = tf.nest.map_structure(_narrow, (args, kwargs))
    return tf.cast(call_function(call, *args, **kwargs), tf.int64)


def _narrow(leaf: object) -> object:
    values = None if is_tensor(leaf) or isinstance(leaf, int) else read_array(leaf)
    return leaf if values is None or values.dtype != np.int64 else values.astype(np.int32)
