"""Replaces TimeDistributed layers by layers that treat each step as an example."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.read_model import read_model
from keras_qat.helper_layers.operations import FlattenTime, RestoreTime
from keras_qat.keras2.backend import layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.keras2.readability import is_graph_model
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.registry import find_op, is_listed

_SPLIT_LATER = (layers.SeparableConv1D, layers.SeparableConv2D, layers.TimeDistributed)
"""Layers without an operator. `split_layers` replaces them by layers with operators."""


def split_time_distributed(call: Call, context: LoweringContext) -> list[Call]:
    """Replace TimeDistributed(layer) by FlattenTime, layer and RestoreTime.

    TimeDistributed(Dense) becomes a Dense. The call stays unchanged if the layer has no operator,
    or if a size is unknown before run time.
    """
    inner, parts = call.layer.layer, PartsBuilder(call, context)
    weights = context.weights.get(call.layer)  # The inner layer of a copy has random weights.
    (sequence,), sizes = call.inputs, call.output.shape[1:]
    is_open = None in (*sequence.shape[1:], *sizes)
    if is_graph_model(inner):
        return [] if weights or is_open else _split_model_per_step(parts)
    trainable = call.layer.trainable and inner.trainable
    layer = parts.new("", clone, inner, trainable=trainable, weights=weights or inner.weights)
    if type(inner) is layers.Dense:
        return parts.chain(layer)
    is_known = is_listed(inner) or type(inner) in _SPLIT_LATER
    is_known = is_known and (
        not isinstance(inner, layers.RNN) or _has_integer_operator(call, inner)
    )
    is_first = getattr(inner, "data_format", None) == "channels_first"
    if not is_known or is_first or is_open or sequence.masked:
        return []
    folded = _fold(parts, (None, *sequence.shape[2:]))
    return _restore(parts, parts.add(layer, folded, kwargs=call.kwargs, shape=(None, *sizes[1:])))


def _fold(parts: PartsBuilder, shape: Sequence[int | None]) -> Value:
    """Add a FlattenTime, which merges the steps of the input into the batch. Return its output."""
    (sequence,), fold = parts.call.inputs, parts.new("fold", FlattenTime)
    output = dataclasses.replace(parts.between(fold, shape), dtype=sequence.dtype)
    return parts.add(fold, sequence, output=output)


def _restore(parts: PartsBuilder, folded: Value) -> list[Call]:
    """Add a RestoreTime, which splits the steps off the batch. Return all new calls."""
    return parts.end(parts.new("unfold", RestoreTime, parts.call.inputs[0].shape[1]), folded)


def _has_integer_operator(call: Call, layer: layers.RNN) -> bool:
    """Return True if the recurrent layer in a TimeDistributed has an operator."""
    (x,), y = call.inputs, call.output
    step, output = (Value(v.name, (None, *v.shape[2:]), v.dtype) for v in (x, y))
    return not layer.stateful and find_op(Call(layer, (step,), {}, output, call.name)) is not None


def _split_model_per_step(parts: PartsBuilder) -> list[Call]:
    call = parts.call
    (sequence,), name = call.inputs, call.layer.name
    inner = read_model(call.layer.layer)
    inputs, outputs = flatten_values(inner.inputs), flatten_values(inner.outputs)
    is_single = len(inputs) == len(outputs) == 1 and outputs != inputs and not inner.loss_only
    is_first = any(
        getattr(inner_call.layer, "data_format", "") == "channels_first"
        for inner_call in inner.calls
    )
    if not is_single or is_first or sequence.masked:
        return []
    if call.kwargs.get("training") is not None:
        return []
    trainable = call.layer.trainable and call.layer.layer.trainable
    values = {inputs[0]: _fold(parts, inputs[0].shape)}

    def copy_layer(inner_call: Call) -> layers.Layer:
        layer, part = inner_call.layer, f"{name}_{inner_call.name.replace('/', '_')}"
        trains = trainable and layer.trainable
        return parts.context.clone(layer, "step", layer.weights, name=part, trainable=trains)

    def rename(value: Value) -> Value:
        label = f"{call.name}_{value.name}{call.output.name.removeprefix(call.name)}"
        values[value] = Value(label, value.shape, value.dtype, masked=value.masked)
        return values[value]

    for inner_call in inner.calls:
        args, kwargs = map_values(values.__getitem__, (inner_call.args, inner_call.kwargs))
        output = map_values(rename, inner_call.outputs)
        parts.add(copy_layer(inner_call), *args, kwargs=kwargs, output=output)
    return _restore(parts, values[outputs[0]])
