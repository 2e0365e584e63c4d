"""Lowers layers that work along one more axis than int8 operators have."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.operations import operation_class
from keras_qat.graph.read_model import read_model
from keras_qat.helper_layers.operations import FlattenTime, RestoreTime
from keras_qat.keras2.backend import layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.keras2.readability import is_graph_model
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.registry import find_op, is_listed

_SPLIT_LATER = (layers.SeparableConv1D, layers.SeparableConv2D, layers.TimeDistributed)
"""Layers that no row lists, but whose components have rows."""


def split_time_distributed(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers TimeDistributed(layer) to FlattenTime, layer and RestoreTime; Dense stays alone.

    It stays as it is if the layer has no row.
    """
    inner, parts = call.layer.layer, PartsBuilder(call, context)
    weights = context.weights.get(call.layer)  # Those of a copy, which is not built.
    if is_graph_model(inner):
        return [] if weights else _split_model_per_step(parts)
    trainable = call.layer.trainable and inner.trainable
    layer = parts.new("", clone, inner, trainable=trainable, weights=weights or inner.weights)
    if type(inner) is layers.Dense:
        return parts.chain(layer)
    is_known = is_listed(inner) or type(inner) in _SPLIT_LATER
    is_known = is_known and (not isinstance(inner, layers.RNN) or _in_integers(call, inner))
    is_first = getattr(inner, "data_format", None) == "channels_first"
    if not is_known or is_first or call.inputs[0].masked:
        return []
    folded = _folded(parts, (None, *call.inputs[0].shape[2:]))
    shape = (None, *call.output.shape[2:])
    return _restored(parts, parts.add(layer, folded, kwargs=call.kwargs, shape=shape))


def _folded(parts: PartsBuilder, shape: Any) -> Value:
    """Merges the steps of what a call reads into the batch; integers stay some."""
    (sequence,) = parts.call.inputs
    if None not in sequence.shape[2:]:
        fold = parts.new("fold", FlattenTime)
        output = dataclasses.replace(parts.between(fold, shape), dtype=sequence.dtype)
        return parts.add(fold, sequence, output=output)
    output = Value(f"{parts.call.name}_fold", tuple(shape), sequence.dtype)
    _reshaped(parts, "fold", sequence, output, [(sequence, axis + 1) for axis in range(len(shape))])
    return output


def _restored(parts: PartsBuilder, folded: Value) -> list[Call]:
    """Splits the steps off the batch again, as many as the call reads, and returns all calls."""
    (sequence,), output = parts.call.inputs, parts.call.output
    if None not in (sequence.shape[1], *output.shape[2:]):
        return parts.end(parts.new("unfold", RestoreTime, sequence.shape[1]), folded)
    of_example = [(folded, axis - 1) for axis in range(2, len(output.shape))]
    _reshaped(parts, "unfold", folded, output, [(sequence, 0), (sequence, 1), *of_example])
    return parts.calls


def _reshaped(
    parts: PartsBuilder, name: str, value: Value, output: Value, sizes: list[tuple[Value, int]]
) -> None:
    """Adds operations that reshape a tensor to sizes which are known only at run time.

    Args:
        parts: the calls.
        name: name of the reshape.
        value, output: what it reads and returns.
        sizes: for each axis of the output a tensor, and which of its sizes it has.
    """
    operation, shapes = operation_class(), dict[Value, Value]()

    def integers(part: str, function: Any, count: int, *args: Any) -> Value:
        layer = parts.new(f"{name}_{part}", operation, function, dtype="int32")
        return parts.add(layer, *args, output=_as_integers(parts.between(layer, (count,))))

    known: list[Any] = [[-1]]
    for size, (source, axis) in list(zip(output.shape, sizes, strict=True))[1:]:
        if size is None and source not in shapes:
            rank = len(source.shape)
            shapes[source] = integers(f"shape_{len(shapes)}", tf.shape, rank, source)
        ends = shapes.get(source), [axis], [axis + 1]
        part = f"size_{len(known)}"
        known.append([size] if size else integers(part, tf.strided_slice, 1, *ends))
    shape = integers("sizes", tf.concat, len(known), known, 0)
    parts.add(parts.new(name, operation, tf.reshape), value, shape, output=output)


def _as_integers(value: Value) -> Value:
    return dataclasses.replace(value, dtype="int32")


def _in_integers(call: Call, layer: Any) -> bool:
    """Returns whether a recurrent layer has integer operators for sequences as examples."""
    (x,), y = call.inputs, call.output
    step, output = (Value(v.name, (None, *v.shape[2:]), v.dtype) for v in (x, y))
    return not layer.stateful and find_op(Call(layer, (step,), {}, output, call.name)) is not None


def _split_model_per_step(parts: PartsBuilder) -> list[Call]:
    """Lowers TimeDistributed(model) to FlattenTime, the model's layers and RestoreTime."""
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
    return _restored(parts, values[outputs[0]])
