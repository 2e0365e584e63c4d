"""Split layers that compute several things into calls of one operator each.

For example, a layer with an activation becomes the layer and an activation layer, and a sum of
three tensors becomes two sums. Later steps then have one form to match.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_qat.graph.calls import Call, Graph, values_in
from keras_qat.graph.operations import kind_of
from keras_qat.helper_layers.operations import Contract
from keras_qat.keras2.backend import layers
from keras_qat.keras2.layers_and_models import class_path
from keras_qat.lowering.activations import (
    split_activation,
    split_activation_layer,
    split_activity_regularizer,
)
from keras_qat.lowering.attention import split_attention, split_multi_head_attention
from keras_qat.lowering.builder import Lowering, LoweringContext
from keras_qat.lowering.convolutions import split_separable
from keras_qat.lowering.image_ops import split_random_crop, split_resizing_layer
from keras_qat.lowering.integer_types import with_int32_constants
from keras_qat.lowering.last_axes import IN_INTEGERS, along_last_axes, along_one_last_axis
from keras_qat.lowering.merges import (
    convert_fixed_ranges,
    convert_second_factor,
    merge_two_by_two,
    split_average,
    split_custom_scale,
    split_dot,
    split_extremum,
    split_of_numbers,
    with_same_axes,
)
from keras_qat.lowering.recurrent import split_bidirectional, split_recurrent, with_mask
from keras_qat.lowering.softmax import softmax_of_many, split_softmax
from keras_qat.lowering.tf_operations import OPERATIONS
from keras_qat.lowering.time_distributed import split_pooling_3d, split_time_distributed


def split_layers(graph: Graph, context: LoweringContext) -> Graph:
    """Split every layer that `LOWERINGS` lists. Shared layers stay shared."""
    table = LOWERINGS if context.activations else ALWAYS
    ends = set(values_in(graph.outputs))

    def find_lowering(call: Call) -> Lowering | None:
        layer = call.layer
        may_open = context.may_open(call)
        if isinstance(layer, (layers.Bidirectional, layers.RNN)) and may_open is False:
            return None
        if type(layer) in IN_INTEGERS and not may_open:
            return None
        key = kind_of(layer) or type(layer)
        return table.get(key) or table.get(class_path(layer))

    def split(call: Call) -> list[Call]:
        if call.name in graph.in_float:
            return [call]
        lowering = find_lowering(call)
        parts = split_activity_regularizer(call, context) or with_int32_constants(call, context)
        parts = parts or (lowering(call, context) if lowering else [])
        if context.activations and not parts and ends.isdisjoint(values_in(call.outputs)):
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
    **dict.fromkeys((layers.Add, layers.Multiply), with_same_axes(merge_two_by_two)),
    layers.Average: with_same_axes(split_average),
    layers.Subtract: with_same_axes(),
    "applications.inception_resnet_v2.CustomScaleLayer": split_custom_scale,
}
"""Layer class, or `class_path` of one that Keras does not export -> its lowering."""

LOWERINGS: dict[Any, Lowering] = {
    **ALWAYS,
    **OPERATIONS,
    Contract: convert_second_factor,
    **dict.fromkeys((layers.Normalization, layers.Rescaling), split_of_numbers),
    layers.Dot: split_dot,
    layers.AveragePooling3D: split_pooling_3d,
    layers.MaxPooling3D: split_pooling_3d,
    layers.TimeDistributed: split_time_distributed,
    layers.Bidirectional: split_bidirectional,
    **dict.fromkeys((layers.GRU, layers.SimpleRNN), split_recurrent),
    layers.LSTM: with_mask,
    layers.RandomCrop: split_random_crop,
    **dict.fromkeys((layers.UpSampling2D, layers.Resizing), split_resizing_layer),
    layers.Softmax: split_softmax,
    layers.Attention: split_attention,
    layers.MultiHeadAttention: split_multi_head_attention,
    layers.Concatenate: with_same_axes(convert_fixed_ranges),
    **dict.fromkeys((layers.Maximum, layers.Minimum), with_same_axes(split_extremum)),
    **dict.fromkeys((layers.UnitNormalization, *IN_INTEGERS), along_last_axes),
    layers.BatchNormalization: along_one_last_axis,
    layers.Activation: split_activation_layer,
}
"""`ALWAYS` and the lowerings, also of operations, that only TFLite's operators need."""
