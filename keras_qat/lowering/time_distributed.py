"""Lowers layers that work along one more axis than int8 operators have."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.graph import Call, Value, map_values, values_in
from keras_qat.frontend.helper_layers import FlattenTime, RestoreTime
from keras_qat.frontend.keras2.backend import layers
from keras_qat.frontend.keras2.layers_and_models import clone
from keras_qat.frontend.keras2.readability import is_graph_model
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.registry import is_listed, op_of

_SPLIT_LATER = (layers.SeparableConv1D, layers.SeparableConv2D)
"""Layers that no row lists, but whose parts have rows."""


def split_time_distributed(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers TimeDistributed(layer) to FlattenTime, layer and RestoreTime; Dense stays alone.

    It stays as it is if the layer has no row or the number of steps is unknown.
    """
    inner, steps, parts = call.layer.layer, call.inputs[0].shape[1], PartsBuilder(call, context)
    if is_graph_model(inner):
        return _split_model_per_step(parts)
    trainable = call.layer.trainable and inner.trainable
    layer = parts.new("", clone, inner, trainable=trainable, weights=inner.weights)
    if type(inner) is layers.Dense:
        return parts.chain(layer)
    is_known = is_listed(inner) or type(inner) in _SPLIT_LATER
    is_known = is_known and (not isinstance(inner, layers.RNN) or _in_integers(call, inner))
    is_first = getattr(inner, "data_format", None) == "channels_first"
    if not is_known or is_first or steps is None or call.inputs[0].masked:
        return []
    unfold = parts.new("unfold", RestoreTime, steps)
    folded = _folded(parts, (None, *call.inputs[0].shape[2:]))
    output = parts.add(layer, folded, kwargs=call.kwargs)
    return parts.end(unfold, output)


def _folded(parts: PartsBuilder, shape: Any) -> Value:
    """Merges the steps of what a call reads into the batch; integers stay some."""
    fold, (sequence,) = parts.new("fold", FlattenTime), parts.call.inputs
    output = dataclasses.replace(parts.between(fold, shape), dtype=sequence.dtype)
    return parts.add(fold, sequence, output=output)


def _in_integers(call: Call, layer: Any) -> bool:
    """Returns whether a recurrent layer has integer operators for sequences as examples."""
    (x,), y = call.inputs, call.output
    step, output = (Value(v.name, (None, *v.shape[2:]), v.dtype) for v in (x, y))
    return not layer.stateful and op_of(Call(layer, (step,), {}, output, call.name)) is not None


def _split_model_per_step(parts: PartsBuilder) -> list[Call]:
    """Lowers TimeDistributed(model) to FlattenTime, the model's layers and RestoreTime."""
    call = parts.call
    (sequence,), name = call.inputs, call.layer.name
    inner, steps = graph_lib.read(call.layer.layer), sequence.shape[1]
    inputs, outputs = values_in(inner.inputs), values_in(inner.outputs)
    is_single = len(inputs) == len(outputs) == 1 and outputs != inputs and not inner.loss_only
    is_first = any(
        getattr(inner_call.layer, "data_format", "") == "channels_first"
        for inner_call in inner.calls
    )
    if not is_single or is_first or steps is None or sequence.masked:
        return []
    if call.kwargs.get("training") is not None:
        return []
    trainable = call.layer.trainable and call.layer.layer.trainable
    values = {inputs[0]: _folded(parts, inputs[0].shape)}

    def copy_of(inner_call: Call) -> Any:
        layer, part = inner_call.layer, f"{name}_{inner_call.name.replace('/', '_')}"
        trains = trainable and layer.trainable
        return parts.context.clone(layer, "step", layer.weights, name=part, trainable=trains)

    def renamed(value: Value) -> Value:
        label = f"{call.name}_{value.name}{call.output.name.removeprefix(call.name)}"
        values[value] = Value(label, value.shape, value.dtype, masked=value.masked)
        return values[value]

    for inner_call in inner.calls:
        args, kwargs = map_values(values.__getitem__, (inner_call.args, inner_call.kwargs))
        output = map_values(renamed, inner_call.outputs)
        parts.add(copy_of(inner_call), *args, kwargs=kwargs, output=output)
    return parts.end(parts.new("unfold", RestoreTime, steps), values[outputs[0]])


def split_pooling_3d(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers pooling of volumes to pooling of every slice, then along the slices."""
    layer, (_, depth, _, _, channels) = call.layer, call.inputs[0].shape
    _, new_depth, new_height, new_width, _ = call.output.shape
    if new_depth is None or new_height is None or new_width is None:
        return []
    is_max = isinstance(layer, layers.MaxPooling3D)
    pooling = layers.MaxPooling2D if is_max else layers.AveragePooling2D
    (pool_depth, *pool), (stride_depth, *strides) = layer.pool_size, layer.strides
    parts, padding = PartsBuilder(call, context), layer.padding
    return parts.chain(
        parts.new("fold", FlattenTime),
        parts.new("slices", pooling, pool, strides, padding),
        parts.new("unfold", RestoreTime, depth),
        parts.new("flat", layers.Reshape, (depth, new_height * new_width, channels)),
        parts.new("depth", pooling, (pool_depth, 1), (stride_depth, 1), padding),
        parts.new("", layers.Reshape, (new_depth, new_height, new_width, channels)),
    )
