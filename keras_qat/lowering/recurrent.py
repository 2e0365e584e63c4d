"""Lowering of recurrent layers that go both ways through a sequence, or give their state."""

from __future__ import annotations

from typing import Any

from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.graph import Call, Value, values_in
from keras_qat.frontend.helper_layers import LastStep, ReverseSteps
from keras_qat.frontend.keras2.backend import keras
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.registry import match

__all__ = ["MERGES", "split_bidirectional", "split_state", "why_whole"]

_layers = keras.layers

DIRECTIONS = ("forward", "backward")

MERGES: dict[str, Any] = {
    "concat": _layers.Concatenate,
    "sum": _layers.Add,
    "mul": _layers.Multiply,
    "ave": _layers.Average,
}
"""`merge_mode` -> the layer that does it. None gives both tensors."""


def split_bidirectional(call: Call, context: LoweringContext) -> list[Call]:
    """Bidirectional(layer) -> two layers, ReverseSteps of the second one's steps, and the merge.

    Where not both have integer kernels it stays one layer.
    """
    layer = call.layer
    if call.kwargs.get("training") is not None or why_whole(call):
        return []
    parts, found, sequence = PartsBuilder(call, context), [], call.inputs[0]
    merge, outputs = MERGES.get(layer.merge_mode), values_in(call.outputs)
    states = [outputs.pop(-2), outputs.pop()] if layer.return_state else []
    for place, direction in enumerate(DIRECTIONS):
        inner = _inner(layer, direction)
        trainable = layer.trainable and inner.trainable
        options = {"trainable": trainable, "weights": inner.weights}
        part = parts.new(direction, graph_lib.clone, inner, **options)
        turns = direction == "backward" and layer.return_sequences
        shape = inner.compute_output_shape(sequence.shape)
        shape = shape[0] if states else shape
        output = None if merge else outputs[place]
        one = output if output and not turns else parts.between(part, shape)
        parts.add(part, *_given(call, direction), output=[one, states[place]] if states else one)
        if turns:
            one = parts.add(parts.new("reversed", ReverseSteps), one, shape=shape, output=output)
        found.append(one)
    if merge:
        parts.add(parts.new("", merge), found, output=outputs[0])
    return parts.calls


def _given(call: Call, direction: str) -> Any:
    """What the layer of a direction is called with: the sequence, its half of the states."""
    x, *states = call.inputs
    half, place = len(states) // 2, DIRECTIONS.index(direction)
    return ([x, *states[place * half :][:half]],) if states else (x,)


def split_state(call: Call, context: LoweringContext) -> list[Call]:
    """A layer that gives its state -> one that does not, and the last step of what it gives.

    Where that has no integer kernels it stays one layer.
    """
    layer, (output, *states) = call.layer, values_in(call.outputs)
    one = Value(output.name, output.shape, output.dtype)
    if not states or match(Call(layer, call.args, call.kwargs, one, call.name)).op is None:
        return []
    parts = PartsBuilder(call, context)
    weights = {"weights": context.weights_of(layer)}
    alone = parts.new("", graph_lib.clone, layer, return_state=False, **weights)
    parts.add(alone, *call.args, kwargs=call.kwargs, output=output)
    how = (LastStep,) if layer.return_sequences else (_layers.Activation, "linear")
    parts.add(parts.new("state", *how), output, output=states[0])
    return parts.calls


REASONS: dict[type, str] = {
    _layers.ConvLSTM3D: "TFLite has no int8 kernel of convolutions along three axes",
    _layers.RNN: "it is made of cells; LSTM, GRU and SimpleRNN have integer kernels",
}
"""Layer class -> why it computes in float."""


def why_whole(call: Call) -> str:
    """Why a recurrent layer that no row lists has no integer kernels; "" for other layers.

    That of a Bidirectional is why one of the layers in it has none, "" if both have some.
    """
    if not isinstance(call.layer, _layers.Bidirectional):
        return REASONS.get(type(call.layer), "")
    for direction in DIRECTIONS:
        inner = _inner(call.layer, direction)
        output = Value(call.name, tuple(call.output.shape), call.output.dtype)
        args = _given(call, direction) if call.kwargs.get("mask") is None else call.args
        op, _, reason = match(Call(inner, args, call.kwargs, output, call.name))
        if op is None:
            return reason or f"no int8 rule for {type(inner).__name__}"
    return ""


def _inner(layer: Any, direction: str) -> Any:
    return getattr(layer, f"{direction}_layer")
