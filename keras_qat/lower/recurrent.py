"""Lowering of recurrent layers that go through a sequence both ways."""

from __future__ import annotations

from typing import Any

from keras_qat.inner_layers import ReverseSteps
from keras_qat.keras2 import graph as graph_lib
from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, Value, values_in
from keras_qat.lower.parts import Made, Parts
from keras_qat.ops.registry import match

__all__ = ["MERGES", "split_bidirectional", "why_whole"]

_layers = keras.layers

DIRECTIONS = ("forward", "backward")

MERGES: dict[str, Any] = {
    "concat": _layers.Concatenate,
    "sum": _layers.Add,
    "mul": _layers.Multiply,
    "ave": _layers.Average,
}
"""`merge_mode` -> the layer that does it. None gives both tensors."""


def split_bidirectional(call: Call, made: Made) -> list[Call]:
    """Bidirectional(layer) -> two layers, ReverseSteps of the second one's steps, and the merge.

    Where not both have integer kernels it stays one layer.
    """
    layer = call.layer
    if call.kwargs.get("training") is not None or why_whole(call):
        return []
    parts, (x,), found = Parts(call, made), call.inputs, []
    merge = MERGES.get(layer.merge_mode)
    outputs = [None, None] if merge else values_in(call.outputs)
    for direction, output in zip(DIRECTIONS, outputs, strict=True):
        inner = _inner(layer, direction)
        trainable = layer.trainable and inner.trainable
        options = {"trainable": trainable, "weights": inner.weights}
        part = parts.new(direction, graph_lib.clone, inner, **options)
        turns = direction == "backward" and layer.return_sequences
        shape = inner.compute_output_shape(x.shape)
        one = parts.add(part, x, shape=shape, output=None if turns else output)
        if turns:
            one = parts.add(parts.new("reversed", ReverseSteps), one, shape=shape, output=output)
        found.append(one)
    return parts.end(parts.new("", merge), found) if merge else parts.calls


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
        op, _, reason = match(Call(inner, call.args, call.kwargs, output, call.name))
        if op is None:
            return reason or f"no int8 rule for {type(inner).__name__}"
    return ""


def _inner(layer: Any, direction: str) -> Any:
    return getattr(layer, f"{direction}_layer")
