"""Lowering: splits layers that do several things into layers that do one thing.

For example, a layer with an activation becomes the layer and an activation layer, and a sum of
three tensors becomes two sums. Patterns then have one form to match.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from keras_qat.graph.calls import Call, Graph, is_batch_norm, values_in
from keras_qat.graph.missing_values import REPLACES_NAN, calls_on_missing_values
from keras_qat.graph.size_expressions import with_known_sizes
from keras_qat.graph.static_shapes import close_sizes
from keras_qat.graph.tf_operations import is_operation
from keras_qat.helper_layers.operations import Contract
from keras_qat.imports.read_float import ReadsWeight
from keras_qat.keras2.backend import layers
from keras_qat.keras2.layers_and_models import class_path
from keras_qat.lowering.activations import (
    split_activation,
    split_activation_layer,
    split_activity_regularizer,
)
from keras_qat.lowering.attention import split_attention, split_multi_head_attention
from keras_qat.lowering.attention_masks import recognize_masks
from keras_qat.lowering.builder import Lowering, LoweringContext
from keras_qat.lowering.channels_last import with_channels_last
from keras_qat.lowering.common_subexpressions import merge_common_subexpressions
from keras_qat.lowering.convolutions import split_separable
from keras_qat.lowering.filled import with_filled_constants
from keras_qat.lowering.formulas import recognize_formulas
from keras_qat.lowering.hard_swish import recognize_hard_swish
from keras_qat.lowering.image_ops import split_random_crop, split_resizing_layer
from keras_qat.lowering.integer_types import with_int32_constants
from keras_qat.lowering.joined_parts import with_joined_parts
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
from keras_qat.lowering.open_layers import open_layers
from keras_qat.lowering.positions import positions_as_integers
from keras_qat.lowering.recurrent import split_bidirectional, split_recurrent, with_mask
from keras_qat.lowering.scaled_parts import with_scaled_parts
from keras_qat.lowering.softmax import (
    recognize_log_sum_exp,
    recognize_softmax,
    softmax_of_many,
    split_softmax,
)
from keras_qat.lowering.tf_operations import OPERATIONS
from keras_qat.lowering.time_distributed import split_pooling_3d, split_time_distributed
from keras_qat.lowering.tokens import tokens_as_integers, with_tokens_apart
from keras_qat.ops.registry import op_of


def lower(
    graph: Graph,
    activations: bool = True,
    may_open: Callable[[Call], bool | None] | None = None,
    has_int16: bool = True,
    has_float: bool = True,
) -> Graph:
    """Splits every layer that `LOWERINGS` lists. Shared layers stay shared.

    Args:
        graph: the graph.
        activations: whether to bring activations into the form that runtimes compute.
            `recipes.contrib` keeps them, like the original.
        may_open: whether a layer may be opened; by default none is opened.
        has_int16: False has parts of 16 bits only where 8 bits keep nothing.
        has_float: whether calls that replace NaN stay in float; else the model gets no NaN.

    Raises:
        ValueError: if an operation reads a layer's weight and was not opened.
    """
    context, table = LoweringContext(), LOWERINGS if activations else ALWAYS

    def expand(call: Call) -> list[Call]:
        layer = call.layer
        if call.name in graph.in_float:
            return [call]
        key = str(layer.symbol) if is_operation(layer) else type(layer)
        lowering = table.get(key) or table.get(class_path(layer))
        is_recurrent = isinstance(layer, (layers.Bidirectional, layers.RNN))
        if is_recurrent and may_open and may_open(call) is False:
            lowering = None
        if type(layer) in IN_INTEGERS and not (may_open and may_open(call)):
            lowering = None
        parts = split_activity_regularizer(call, context) or with_int32_constants(call, context)
        parts = parts or (lowering(call, context) if lowering else [])
        if activations and not parts and ends.isdisjoint(values_in(call.outputs)):
            parts = softmax_of_many(call, context, has_int16)
        return [c for part in parts for c in expand(part.as_part_of(call))] or [call]

    close_sizes(graph)
    if may_open is not None:
        graph = open_layers(graph, context, may_open)
        close_sizes(graph)
        graph = with_known_sizes(graph)
        close_sizes(graph)
        graph = with_filled_constants(graph, context)
    for call in graph.calls:
        if isinstance(call.layer, ReadsWeight):
            raise ValueError(call.layer.reason)
    if activations and has_float:
        calls = [call for calls in calls_on_missing_values(graph).values() for call in calls]
        graph.in_float = {call.name: REPLACES_NAN for call in calls}
    if activations:
        graph = with_tokens_apart(tokens_as_integers(graph, context), context)
        graph = with_joined_parts(positions_as_integers(graph, context), context)
        for recognize in RECOGNIZERS:
            graph = recognize(graph, context)
        graph = with_channels_last(graph, context)
    ends = set(values_in(graph.outputs))
    calls = [part for call in graph.calls for part in expand(call)]
    graph = dataclasses.replace(graph, calls=calls, weights=context.weights)
    if activations:
        graph = tokens_as_integers(graph, context)  # Those that a TimeDistributed reads.
        graph = with_scaled_parts(graph, context)
    _name_apart(graph)
    return _drop_identities(
        _drop_unread(merge_common_subexpressions(graph), context) if activations else graph
    )


def _name_apart(graph: Graph) -> None:
    """Renames parts that are called as another layer is: `conv_depthwise` of `conv`."""
    owners = {call.name: call.layer for call in graph.calls if call.name == call.origin}
    for call in graph.calls:
        name = call.name
        while owners.setdefault(name, call.layer) is not call.layer:
            name += "_"
        for value in values_in(call.outputs):
            if name != call.name and value.name.startswith(call.name):
                value.name = name + value.name.removeprefix(call.name)
        call.name = name


def _drop_unread(graph: Graph, context: LoweringContext) -> Graph:
    """Drops calls whose outputs nothing reads: `tf.shape` for a resize, a layer's state."""
    read, calls = set(values_in(graph.outputs)), []
    read.update(value for call in graph.loss_only for value in call.inputs)
    for call in reversed(graph.calls):
        outputs = values_in(call.outputs)
        is_part = context.weights.get(call.layer) == []  # Without weights.
        if read.intersection(outputs) or (any(value.is_float for value in outputs) and not is_part):
            calls.append(call)
            read.update(call.inputs)
    return dataclasses.replace(graph, calls=calls[::-1])


def _drop_identities(graph: Graph) -> Graph:
    """Drops linear activations in front of a BatchNormalization, which would prevent folding."""
    consumers = graph.consumers()
    outputs = values_in(graph.outputs)
    calls = {call: call for call in graph.calls}
    for call in graph.calls:
        op = op_of(call)
        if op is None or op.name != "linear" or len(consumers[call.output]) != 1:
            continue
        producer, (reader,) = call.inputs[0].producer, consumers[call.output]
        weighted = op_of(producer) if producer is not None else None
        if producer is None or weighted is None or not weighted.folds_batch_norm:
            continue
        is_read_once = consumers[producer.output] == [call] and producer.output not in outputs
        if is_batch_norm(reader) and is_read_once:
            args, kwargs = producer.args, producer.kwargs
            calls[producer] = Call(producer.layer, args, kwargs, call.outputs, producer.name)
            del calls[call]
    return dataclasses.replace(graph, calls=list(calls.values()))


RECOGNIZERS = (
    *(recognize_hard_swish, recognize_softmax, recognize_log_sum_exp),
    *(recognize_masks, recognize_formulas),
)
"""What finds several operations that are one: in this order, as masks are of a softmax."""

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
