"""Lowering: layers that do several things become several layers that do one each.

A layer with a built-in activation becomes the layer and an activation; a separable convolution
becomes its depthwise and its pointwise convolution; a sum of three becomes two sums of two. After
that, patterns have one form to match.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat import graph as graph_lib
from keras_qat.backend import keras
from keras_qat.graph import Call, Graph, Value

__all__ = ["lower"]

_layers = keras.layers
_Split = list[tuple[Any, list[Any]]]
"""Layers that together do what one did, each with the weights it starts from."""


def lower(graph: Graph) -> Graph:
    """`graph` with every layer split that `LOWERINGS` lists. Shared layers stay shared."""
    made: dict[Any, _Split] = {}
    weights = dict(graph.weights)
    calls: list[Call] = []
    for call in graph.calls:
        if type(call.layer) in (_layers.Add, _layers.Multiply) and len(call.inputs) > 2:
            calls += _merge_two_by_two(call)
            continue
        lowering = LOWERINGS.get(type(call.layer))
        if call.layer not in made:
            made[call.layer] = lowering(call.layer) if lowering else []
        parts = made[call.layer]
        if not parts:
            calls.append(call)
            continue
        weights.update(parts)
        value, args, kwargs = call.output, call.args, call.kwargs
        for index, (layer, _) in enumerate(parts):
            last = index == len(parts) - 1
            shape = value.shape if last else _shape(layer, args[0].shape)
            name = call.name.removesuffix(call.layer.name) + layer.name
            label = name if name != call.name else f"{name}_before_activation"
            label += value.name.removeprefix(call.name)
            output = value if last else Value(label, shape, value.dtype)
            calls.append(Call(layer, args, kwargs, output, name))
            args, kwargs = (output,), {}
    return Graph(graph.name, graph.inputs, graph.outputs, graph.output_names, calls, weights)


def _merge_two_by_two(call: Call) -> list[Call]:
    """A sum of n tensors as n - 1 sums of two, as the runtimes' kernels take no more than two."""
    merge, (first, *others), made = type(call.layer), call.inputs, []
    for index, other in enumerate(others, start=1):
        if index == len(others):
            layer, name, output = call.layer, call.name, call.output
        else:
            name = f"{call.name}_part{index}"
            layer = merge(name=name, dtype=call.layer.dtype_policy)
            shape = tf.broadcast_static_shape(*map(tf.TensorShape, (first.shape, other.shape)))
            output = Value(
                name + call.output.name.removeprefix(call.name), tuple(shape), first.dtype
            )
        made.append(Call(layer, ([first, other],), {}, output, name))
        first = output
    return made


def _shape(layer: Any, shape: Any) -> tuple[int | None, ...]:
    return tuple(layer.compute_output_shape(shape))


def _split_activation(layer: Any) -> _Split:
    """conv(activation=f) -> conv, f. The layer keeps its name; the activation is named after it."""
    if layer.activation in (None, keras.activations.linear):
        return []
    linear = graph_lib.clone(layer, activation="linear")
    return [(linear, layer.weights), (_activation(layer), [])]


def _activation(layer: Any) -> Any:
    return _layers.Activation(
        layer.activation, name=f"{layer.name}_activation", dtype=layer.dtype_policy
    )


def _split_separable(layer: Any) -> _Split:
    """SeparableConv2D -> DepthwiseConv2D, Conv2D 1x1, and its activation if it has one."""
    shared: dict[str, Any] = {
        "data_format": layer.data_format,
        "dtype": layer.dtype_policy,
        "trainable": layer.trainable,
    }
    depthwise = _layers.DepthwiseConv2D(
        layer.kernel_size,
        strides=layer.strides,
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        depth_multiplier=layer.depth_multiplier,
        use_bias=False,
        depthwise_regularizer=layer.depthwise_regularizer,
        depthwise_constraint=layer.depthwise_constraint,
        name=f"{layer.name}_depthwise",
        **shared,
    )
    pointwise = _layers.Conv2D(
        layer.filters,
        1,
        use_bias=layer.use_bias,
        kernel_regularizer=layer.pointwise_regularizer,
        kernel_constraint=layer.pointwise_constraint,
        bias_regularizer=layer.bias_regularizer,
        bias_constraint=layer.bias_constraint,
        activity_regularizer=layer.activity_regularizer,
        name=layer.name,
        **shared,
    )
    bias = [layer.bias] if layer.use_bias else []
    parts = [(depthwise, [layer.depthwise_kernel]), (pointwise, [layer.pointwise_kernel, *bias])]
    if layer.activation not in (None, keras.activations.linear):
        parts.append((_activation(layer), []))
    return parts


LOWERINGS: dict[type, Callable[[Any], _Split]] = {
    _layers.Conv2D: _split_activation,
    _layers.DepthwiseConv2D: _split_activation,
    _layers.Dense: _split_activation,
    _layers.SeparableConv2D: _split_separable,
}
