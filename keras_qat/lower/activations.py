"""Lowering of activations: out of the layers that hold them, and into parts that have kernels."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat import graph as graph_lib
from keras_qat.backend import keras
from keras_qat.graph import Call
from keras_qat.lower.parts import Lowering, Made, between, chain, path

__all__ = ["activation_of", "split_activation", "split_activation_layer", "split_swish"]

_layers = keras.layers


def split_activation(call: Call, made: Made) -> list[Call]:
    """conv(activation=f) -> conv, f. The layer keeps its name; the activation is named after it."""
    layer = call.layer
    if layer.activation in (None, keras.activations.linear):
        return []
    linear = made.layer(
        layer, "linear", lambda: graph_lib.clone(layer, activation="linear"), made.weights_of(layer)
    )
    activation = activation_of(layer, made)
    middle = between(call, linear, call.output.shape)
    return [
        Call(linear, call.args, call.kwargs, middle, call.name),
        Call(activation, (middle,), {}, call.output, path(call, activation)),
    ]


def activation_of(layer: Any, made: Made) -> Any:
    def make() -> Any:
        name = f"{layer.name}_activation"
        return _layers.Activation(layer.activation, name=name, dtype=layer.dtype_policy)

    return made.layer(layer, "activation", make)


def _split_hard_sigmoid(call: Call, made: Made) -> list[Call]:
    """hard_sigmoid -> Rescaling(0.2, 0.5), ReLU(1), as Keras 2 defines it."""
    layer = call.layer
    name = f"{layer.name}_scale"
    return chain(
        call,
        made.layer(layer, "scale", lambda: _layers.Rescaling(0.2, 0.5, name=name)),
        made.layer(layer, "clip", lambda: _layers.ReLU(1.0, name=layer.name)),
    )


def split_activation_layer(call: Call, made: Made) -> list[Call]:
    """An activation that has no kernel, but whose parts have."""
    split = ACTIVATIONS.get(call.layer.activation)
    return split(call, made) if split else []


def split_swish(call: Call, made: Made) -> list[Call]:
    """swish -> sigmoid, Multiply: TFLite has no kernel for it, but for its parts."""
    layer = call.layer
    name = f"{layer.name}_sigmoid"
    sigmoid = made.layer(layer, "sigmoid", lambda: _layers.Activation("sigmoid", name=name))
    multiply = made.layer(layer, "multiply", lambda: _layers.Multiply(name=layer.name))
    gate = between(call, sigmoid, call.output.shape)
    return [
        Call(sigmoid, (call.inputs[0],), {}, gate, path(call, sigmoid)),
        Call(multiply, ([call.inputs[0], gate],), {}, call.output, call.name),
    ]


ACTIVATIONS: dict[Any, Lowering] = {
    keras.activations.swish: split_swish,
    tf.nn.silu: split_swish,
    keras.activations.hard_sigmoid: _split_hard_sigmoid,
}
"""Activation function -> what splits it."""
