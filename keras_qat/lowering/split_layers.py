"""Splits layers that compute several operations into calls of single operators.

A layer with an activation becomes two layers. A sum of three tensors becomes two sums.
"""

from __future__ import annotations

from typing import Any

from keras_qat.graph.calls import Call, Graph, flatten_values
from keras_qat.graph.operations import get_kind
from keras_qat.keras2.backend import layers
from keras_qat.lowering.activations import (
    split_activation,
    split_activation_layer,
    split_activity_regularizer,
    widen_softmax,
)
from keras_qat.lowering.attention import split_multi_head_attention
from keras_qat.lowering.builder import Lowering, LoweringContext, rewrite_calls
from keras_qat.lowering.expand_call import expand_call
from keras_qat.lowering.expansions import find_expansion
from keras_qat.lowering.expansions.statistics import IN_INTEGERS
from keras_qat.lowering.integer_types import narrow_constants
from keras_qat.lowering.recurrent import merge_mask, split_bidirectional, split_recurrent
from keras_qat.lowering.time_distributed import split_time_distributed
from keras_qat.lowering.weighted_products import (
    CONVOLUTIONS,
    make_constant_weight,
    make_embedding,
    split_product,
    split_separable,
)


def split_layers(graph: Graph, context: LoweringContext) -> Graph:
    """Split calls with the functions in `LOWERINGS` or `expansions`. Split the results again."""
    table = LOWERINGS if context.activations else ALWAYS
    ends = set(flatten_values(graph.outputs))

    def replace(call: Call) -> list[Call]:
        layer, may_trace = call.layer, context.may_trace(call)
        if isinstance(layer, (layers.Bidirectional, layers.RNN)) and may_trace is False:
            return []
        if type(layer) in IN_INTEGERS and not may_trace:
            return []
        expansion = find_expansion(call, context.activations)
        if expansion and (parts := expand_call(call, expansion, context)):
            return parts
        lowering = table.get(get_kind(layer) or type(layer))
        return lowering(call, context) if lowering else []

    def split(call: Call) -> list[Call]:
        if call.name in graph.in_float:
            return [call]
        parts = split_activity_regularizer(call, context) or narrow_constants(call, context)
        parts = parts or replace(call)
        if context.activations and not parts and ends.isdisjoint(flatten_values(call.outputs)):
            parts = widen_softmax(call, context)
        return [c for part in parts for c in split(part.as_part_of(call))] or [call]

    return rewrite_calls(graph, split)


ALWAYS: dict[Any, Lowering] = {
    **dict.fromkeys((layers.Conv1D, layers.Conv1DTranspose), split_activation),
    **dict.fromkeys((layers.Conv2D, layers.Conv2DTranspose), split_activation),
    **dict.fromkeys((layers.DepthwiseConv1D, layers.DepthwiseConv2D), split_activation),
    **dict.fromkeys((layers.Dense, layers.EinsumDense), split_activation),
    **dict.fromkeys((layers.SeparableConv1D, layers.SeparableConv2D), split_separable),
}
"""Maps a layer class to a function that splits it. All recipes use these functions."""


LOWERINGS: dict[Any, Lowering] = {
    **ALWAYS,
    "einsum": make_constant_weight,
    "matmul": lambda *given: split_product(*given) or make_constant_weight(*given),
    **dict.fromkeys(CONVOLUTIONS, split_product),
    "gather": make_embedding,
    "embedding_lookup": make_embedding,
    layers.TimeDistributed: split_time_distributed,
    layers.Bidirectional: split_bidirectional,
    **dict.fromkeys((layers.GRU, layers.SimpleRNN), split_recurrent),
    layers.LSTM: merge_mask,
    layers.MultiHeadAttention: split_multi_head_attention,
    layers.Activation: split_activation_layer,
}
"""Maps a layer class, or a kind of operation such as "matmul", to a function that replaces it.

`recipes.contrib` uses only `ALWAYS`. The package `expansions` splits layers without weights.
"""
