"""Split layers that compute several things into calls of one operator each.

For example, a layer with an activation becomes the layer and an activation layer, and a sum of
three tensors becomes two sums. Later steps then have one form to match.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_qat.graph.calls import Call, Graph, flatten_values
from keras_qat.graph.operations import get_kind
from keras_qat.keras2.backend import layers
from keras_qat.lowering.activations import (
    split_activation,
    split_activation_layer,
    split_activity_regularizer,
)
from keras_qat.lowering.attention import split_attention, split_multi_head_attention
from keras_qat.lowering.builder import Lowering, LoweringContext
from keras_qat.lowering.constant_weights import (
    split_constant_table,
    split_product,
    with_constant_weight,
)
from keras_qat.lowering.convolutions import split_separable
from keras_qat.lowering.expand_call import expand_call
from keras_qat.lowering.expansions import find_expansion, is_of_floats
from keras_qat.lowering.expansions.normalization import IN_INTEGERS
from keras_qat.lowering.integer_types import with_int32_constants
from keras_qat.lowering.recurrent import split_bidirectional, split_recurrent, with_mask
from keras_qat.lowering.softmax import softmax_of_many, split_softmax
from keras_qat.lowering.time_distributed import split_time_distributed
from keras_qat.lowering.weighted_products import CONVOLUTIONS, split_convolution


def split_layers(graph: Graph, context: LoweringContext) -> Graph:
    """Split every layer that `LOWERINGS` lists. Shared layers stay shared."""
    table = LOWERINGS if context.activations else ALWAYS
    ends = set(flatten_values(graph.outputs))

    def replace(call: Call) -> list[Call]:
        """Return the calls that an expansion or a lowering puts in place of a call."""
        layer, may_open = call.layer, context.may_open(call)
        if isinstance(layer, (layers.Bidirectional, layers.RNN)) and may_open is False:
            return []
        if type(layer) in IN_INTEGERS and not may_open:
            return []
        expansion = find_expansion(call, context.activations)
        if expansion and (parts := expand_call(call, expansion, context)):
            return parts
        lowering = table.get(get_kind(layer) or type(layer))
        return lowering(call, context) if lowering else []

    def split(call: Call) -> list[Call]:
        if call.name in graph.in_float:
            return [call]
        parts = split_activity_regularizer(call, context) or with_int32_constants(call, context)
        parts = parts or replace(call)
        if context.activations and not parts and ends.isdisjoint(flatten_values(call.outputs)):
            parts = softmax_of_many(call, context, context.has_int16)
        return [c for part in parts for c in split(part.as_part_of(call))] or [call]

    calls = [part for call in graph.calls for part in split(call)]
    return dataclasses.replace(graph, calls=calls)


ALWAYS: dict[Any, Lowering] = {
    **dict.fromkeys((layers.Conv1D, layers.Conv1DTranspose), split_activation),
    **dict.fromkeys((layers.Conv2D, layers.Conv2DTranspose), split_activation),
    **dict.fromkeys((layers.DepthwiseConv1D, layers.DepthwiseConv2D), split_activation),
    **dict.fromkeys((layers.Dense, layers.EinsumDense), split_activation),
    **dict.fromkeys((layers.SeparableConv1D, layers.SeparableConv2D), split_separable),
}
"""Layer class -> its lowering."""


def _try_each(*lowerings: Lowering) -> Lowering:
    """Return a lowering of floats that tries several in order."""

    def lower(call: Call, context: LoweringContext) -> list[Call]:
        if not is_of_floats(call):
            return []
        return next((parts for lowering in lowerings if (parts := lowering(call, context))), [])

    return lower


LOWERINGS: dict[Any, Lowering] = {
    **ALWAYS,
    "einsum": _try_each(with_constant_weight),
    "matmul": _try_each(split_product, with_constant_weight),
    **dict.fromkeys(CONVOLUTIONS, _try_each(split_convolution)),
    "conv1d_transpose": split_convolution,  # Reads a shape, too.
    "conv2d_transpose": split_convolution,
    "gather": split_constant_table,
    "embedding_lookup": split_constant_table,
    layers.TimeDistributed: split_time_distributed,
    layers.Bidirectional: split_bidirectional,
    **dict.fromkeys((layers.GRU, layers.SimpleRNN), split_recurrent),
    layers.LSTM: with_mask,
    layers.Softmax: split_softmax,
    layers.Attention: split_attention,
    layers.MultiHeadAttention: split_multi_head_attention,
    layers.Activation: split_activation_layer,
}
"""`ALWAYS`, and lowerings of layers and operations that only TFLite's operators need.

Each splits weights, or makes weights of constants. The others are expansions.
"""
