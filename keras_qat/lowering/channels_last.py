"""Converts channels-first models to channels last.

TFLite's int8 kernels, and many of TensorFlow's CPU kernels, only support channels last. Each
channels-first layer reads a channels-last copy of its input. Elementwise layers then read the copy,
too. A Permute restores the original layout for all other layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, is_batch_norm, map_values
from keras_qat.graph.precision import get_policy
from keras_qat.keras2.backend import layers
from keras_qat.lowering.activations import split_activation
from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.weighted_products import split_separable
from keras_qat.ops.registry import find_op


def move_channels_last(graph: Graph, context: LoweringContext) -> Graph:
    if not any(_has_channels_first(call) or _is_norm_of_first(call) for call in graph.calls):
        return graph
    visitor = _Visitor(context)
    for call in graph.calls:
        for part in _split_off_activation(call, context):
            visitor.visit(part)
    for value in [
        *flatten_values(graph.outputs),
        *(v for call in graph.loss_only for v in call.inputs),
    ]:
        visitor.restore(value)
    return dataclasses.replace(graph, calls=visitor.calls)


def _split_off_activation(call: Call, context: LoweringContext) -> list[Call]:
    """Split off a channels-first layer's activation. A softmax then keeps its original axis."""
    layer, parts = call.layer, list[Call]()
    if _has_channels_first(call) and getattr(layer, "activation", None) is not None:
        is_separable = isinstance(layer, (layers.SeparableConv1D, layers.SeparableConv2D))
        parts = (split_separable if is_separable else split_activation)(call, context)
    return [part.as_part_of(call) for part in parts] or [call]


def _has_channels_first(call: Call) -> bool:
    """Return True for a channels-first layer, except a ConvLSTM, which has time as axis 1."""
    is_first = getattr(call.layer, "data_format", None) == "channels_first"
    return is_first and not isinstance(call.layer, layers.RNN)


def _is_norm_of_first(call: Call) -> bool:
    rank = len(call.output.shape)
    return is_batch_norm(call) and list(tf.nest.flatten(call.layer.axis)) == [1] and rank > 2


class _Visitor:
    def __init__(self, context: LoweringContext) -> None:
        self.context = context
        self.calls: list[Call] = []
        self.channels_last: dict[Value, Value] = {}
        """Maps a channels-first value to its channels-last copy."""
        self.computed: set[Value] = set()
        """Values that are available in their original layout."""

    def visit(self, call: Call) -> None:
        layer = self.find_layer(call)
        if layer is not None:
            self.compute(call, layer)
            return
        for value in call.inputs:
            self.restore(value)
        self.calls.append(call)
        self.computed.update(flatten_values(call.outputs))

    def find_layer(self, call: Call) -> layers.Layer | None:
        """Return a layer that computes a call on channels-last inputs, or None."""
        layer, rank = call.layer, len(call.output.shape)
        reads_copy = any(value in self.channels_last for value in call.inputs)
        joins_channels = type(layer) is layers.Concatenate and layer.axis in (1, 1 - rank)
        if _has_channels_first(call) and len(call.inputs) == 1:
            return self.copy(layer, data_format="channels_last")
        if _is_norm_of_first(call):
            return self.copy(layer, axis=rank - 1)
        if reads_copy and joins_channels:
            return self.copy(layer, axis=-1)
        return layer if reads_copy and self.is_elementwise(call) else None

    def is_elementwise(self, call: Call) -> bool:
        layer = call.layer
        known = (layers.Activation, layers.Dropout, layers.GaussianNoise, layers.ReLU)
        op = find_op(call)
        is_plain = op.elementwise if op is not None else type(layer) in known
        return is_plain and all(len(x.shape) == len(call.output.shape) for x in call.inputs)

    def copy(self, layer: layers.Layer, **config: Any) -> layers.Layer:
        return self.context.clone(layer, "channels_last", self.context.get_weights(layer), **config)

    def compute(self, call: Call, layer: layers.Layer) -> None:
        """Add a call of `layer` on channels-last copies of the inputs."""
        for value in call.inputs:
            if value not in self.channels_last:
                self.channels_last[value] = self.permute(value, call, to_last=True)
        args, kwargs = map_values(self.channels_last.__getitem__, (call.args, call.kwargs))
        output = call.output
        if len(output.shape) < 3 or type(layer) is layers.Flatten:
            self.calls.append(Call(layer, args, kwargs, output, call.name).as_part_of(call))
            self.computed.add(output)
            return
        shape = _permute_shape(output.shape, _make_order(len(output.shape), True))
        copy = Value(output.name, shape, output.dtype, masked=output.masked)
        self.channels_last[output] = copy
        self.calls.append(Call(layer, args, kwargs, copy, call.name).as_part_of(call))

    def restore(self, value: Value) -> None:
        """Compute a channels-first value from its channels-last copy, unless it already exists."""
        copy = self.channels_last.get(value)
        if copy is not None and value not in self.computed and value.producer is not None:
            self.computed.add(value)
            self.permute(copy, value.producer, to_last=False, output=value)
            value.name += "_channels_first"

    def permute(
        self, value: Value, call: Call, to_last: bool, output: Value | None = None
    ) -> Value:
        order = _make_order(len(value.shape), to_last)
        suffix = "channels_last" if to_last else "channels_first"
        name = f"{value.name.replace('/', '_').replace('#', '_call').replace(':', '_')}_{suffix}"
        dtype = get_policy(value.dtype)
        make = lambda: layers.Permute(order, name=name, dtype=dtype)  # noqa: E731
        layer = self.context.layer(value, suffix, make)
        if output is None:
            output = Value(
                name, _permute_shape(value.shape, order), value.dtype, masked=value.masked
            )
        self.calls.append(Call(layer, (value,), {}, output, name).as_part_of(call))
        return output


def _make_order(rank: int, to_last: bool) -> tuple[int, ...]:
    return (*range(2, rank), 1) if to_last else (rank - 1, *range(1, rank - 1))


def _permute_shape(shape: Sequence[int | None], order: tuple[int, ...]) -> tuple[int | None, ...]:
    return (shape[0], *(shape[axis] for axis in order))
