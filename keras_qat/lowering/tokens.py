"""Makes integers of tokens that come as real numbers, as an `Input` without a type has them."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from keras_qat.frontend.graph import Call, Graph, Value, map_values, values_in
from keras_qat.frontend.helper_layers import Indices, WeightTensor
from keras_qat.frontend.keras2.backend import layers
from keras_qat.frontend.known_sizes import SHAPES
from keras_qat.frontend.tf_operations import is_operation
from keras_qat.lowering.builder import LoweringContext, PartsBuilder

COMPARISONS = (
    *("math.equal", "math.not_equal", "math.greater", "math.greater_equal", "math.less"),
    *("math.less_equal", "__operators__.eq", "__operators__.ne"),
)


def tokens_as_integers(graph: Graph, context: LoweringContext) -> Graph:
    """Casts inputs once that embeddings or casts to integers read, and nothing computes with."""
    readers, outputs = graph.consumers(), set(values_in(graph.outputs))
    tokens: dict[Value, Value] = {}
    casts: list[Call] = []
    for value in values_in(graph.inputs):
        takers = list(filter(_takes_integers, readers[value]))
        if not (value.is_float and takers) or value in outputs:
            continue
        if all(_takes_integers(call) or _keeps_integers(call) for call in readers[value]):
            parts = PartsBuilder(takers[0], context)
            layer = parts.new("indices", Indices)
            tokens[value] = Value(parts.path(layer), value.shape, "int32")
            parts.add(layer, value, output=tokens[value])
            casts += parts.calls
    if not tokens:
        return graph

    def with_tokens(call: Call) -> Call:
        if tokens.keys().isdisjoint(call.inputs):
            return call
        args, kwargs = map_values(lambda value: tokens.get(value, value), (call.args, call.kwargs))
        if is_operation(call.layer):  # No number may be real beside integers.
            args, kwargs = tf.nest.map_structure(
                lambda x: int(x) if isinstance(x, float) else x, (args, kwargs)
            )
        return Call(call.layer, args, kwargs, call.outputs, call.name).as_part_of(call)

    calls = [*casts, *map(with_tokens, graph.calls)]
    return dataclasses.replace(graph, calls=calls)


def _takes_integers(call: Call) -> bool:
    """Returns whether a call casts real numbers to integers, or is an Embedding, which does."""
    layer = call.layer
    if is_operation(layer):
        return layer.symbol == "cast" and call.output.dtype in ("int32", "int64")
    while type(layer) is layers.TimeDistributed:
        layer = layer.layer
    return isinstance(layer, layers.Embedding)


def _keeps_integers(call: Call) -> bool:
    """Returns whether a call computes the same of integers: a shape, or a comparison with one."""
    if type(call.layer) is WeightTensor:  # Reads no numbers.
        return True
    symbol = str(call.layer.symbol) if is_operation(call.layer) else ""
    given = [*call.args, *call.kwargs.values()]
    compared = [x for x in given if isinstance(x, (int, float))]
    is_of_numbers = len(call.inputs) == len(compared) == 1 and compared[0] == int(compared[0])
    return symbol in SHAPES or (symbol in COMPARISONS and is_of_numbers)
