"""Lowering of activations: out of the layers that hold them, and into parts that have kernels."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.inner_layers import Regularize
from keras_qat.keras2 import graph as graph_lib
from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, Value, values_in
from keras_qat.lower.parts import Lowering, Made, between, chain, path

__all__ = [
    "activation_of",
    "split_activation",
    "split_activation_layer",
    "split_activity_regularizer",
    "split_swish",
    "weights_without_activation",
]

_layers = keras.layers


def split_activation(call: Call, made: Made) -> list[Call]:
    """conv(activation=f) -> conv, f. The layer keeps its name; the activation is named after it."""
    layer = call.layer
    if layer.activation in (None, keras.activations.linear):
        return []
    linear = made.layer(
        layer,
        "linear",
        lambda: graph_lib.clone(layer, activation="linear"),
        weights_without_activation(layer, made),
    )
    activation = activation_of(layer, made)
    middle = between(call, linear, call.output.shape)
    return [
        Call(linear, call.args, call.kwargs, middle, call.name),
        Call(activation, (middle,), {}, call.output, path(call, activation)),
    ]


_REGULARIZED_IN_PARTS = (Regularize, _layers.MultiHeadAttention)


def split_activity_regularizer(call: Call, made: Made) -> list[Call]:
    """layer(activity_regularizer=r) -> layer, Regularize(r).

    In a wrapper the layer's own call would be regularized, which is not computed at inference.
    """
    layer = call.layer
    if layer.activity_regularizer is None or len(values_in(call.outputs)) > 1:
        return []
    if type(layer) in _REGULARIZED_IN_PARTS or "activity_regularizer" not in layer.get_config():
        return []
    plain = made.layer(
        layer,
        "plain",
        lambda: graph_lib.clone(layer, activity_regularizer=None),
        made.weights_of(layer),
    )
    regularize = made.layer(
        layer,
        "regularize",
        lambda: Regularize(layer.activity_regularizer, name=f"{layer.name}_regularizer"),
    )
    output = call.output
    name = f"{output.name}_before_regularizer"
    middle = Value(name, output.shape, output.dtype, masked=output.masked)
    return [
        Call(plain, call.args, call.kwargs, middle, call.name),
        Call(regularize, (middle,), {}, output, path(call, regularize)),
    ]


def activation_of(layer: Any, made: Made) -> Any:
    """The activation in a layer as a layer of its own: a copy of it, if it is a layer itself."""
    name, inner = f"{layer.name}_activation", layer.activation
    if isinstance(inner, _layers.Layer):
        make = lambda: graph_lib.clone(inner, name=name)  # noqa: E731
        return made.layer(layer, "activation", make, inner.weights)
    make = lambda: _layers.Activation(inner, name=name, dtype=layer.dtype_policy)  # noqa: E731
    return made.layer(layer, "activation", make)


def weights_without_activation(layer: Any, made: Made) -> list[Any]:
    """What a layer starts from, without the weights of an activation in it that is a layer."""
    inner = {id(weight) for weight in getattr(layer.activation, "weights", ())}
    return [weight for weight in made.weights_of(layer) if id(weight) not in inner]


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
    """An activation whose parts have kernels, not it; the layer in one that is a layer."""
    layer = call.layer
    if isinstance(layer.activation, _layers.Layer):
        make = lambda: graph_lib.clone(layer.activation, name=layer.name)  # noqa: E731
        return chain(call, made.layer(layer, "layer", make, layer.activation.weights))
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
