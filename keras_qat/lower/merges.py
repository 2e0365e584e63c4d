"""Lowering of layers that merge tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.backend import keras
from keras_qat.graph import Call
from keras_qat.lower.parts import Made, between, chain, path

__all__ = ["merge_two_by_two", "split_average", "split_custom_scale"]

_layers = keras.layers


def merge_two_by_two(call: Call, made: Made) -> list[Call]:
    """A sum of n tensors as n - 1 sums of two, as the runtimes' kernels take no more than two."""
    if len(call.inputs) <= 2:
        return []
    merge: Any = type(call.layer)
    first, *others = call.inputs
    calls: list[Call] = []
    for index, other in enumerate(others, start=1):
        layer, output = call.layer, call.output
        if index < len(others):
            name = f"{call.layer.name}_part{index}"
            make = partial(merge, name=name, dtype=call.layer.dtype_policy)
            layer = made.layer(call.layer, name, make)
            shape = tf.broadcast_static_shape(*map(tf.TensorShape, (first.shape, other.shape)))
            output = between(call, layer, shape)
        calls.append(Call(layer, ([first, other],), {}, output, path(call, layer)))
        first = output
    return calls


def split_average(call: Call, made: Made) -> list[Call]:
    """Average -> Add, Rescaling."""
    layer, count = call.layer, len(call.inputs)
    return chain(
        call,
        made.layer(layer, "add", lambda: _layers.Add(name=f"{layer.name}_add")),
        made.layer(layer, "scale", lambda: _layers.Rescaling(1.0 / count, name=layer.name)),
    )


def split_custom_scale(call: Call, made: Made) -> list[Call]:
    """InceptionResNetV2's CustomScaleLayer, a + scale * b -> Rescaling, Add."""
    layer, (a, b) = call.layer, call.inputs
    rescaling = made.layer(
        layer, "scale", lambda: _layers.Rescaling(layer.scale, name=f"{layer.name}_scale")
    )
    add = made.layer(layer, "add", lambda: _layers.Add(name=layer.name))
    scaled = between(call, rescaling, b.shape)
    return [
        Call(rescaling, (b,), {}, scaled, path(call, rescaling)),
        Call(add, ([a, scaled],), {}, call.output, call.name),
    ]
