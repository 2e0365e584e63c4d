"""Lowers activations: splits them off their layers, and into parts that have TFLite operators.

Recognizes a hard swish that a model computes with several operations.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.helper_layers.operations import HardSwish, Regularize
from keras_qat.imports.keras3 import activations as keras_3
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.builder import Lowering, LoweringContext, PartsBuilder, replace_by
from keras_qat.lowering.patterns import Match, Rule, any_of, operation, tensor


def split_activation(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers conv(activation=f) to conv and f. The layer keeps its name; f is named after it."""
    layer = call.layer
    if layer.activation in (None, keras.activations.linear):
        return []
    parts, weights = PartsBuilder(call, context), weights_without_activation(layer, context)
    linear = context.clone(layer, "linear", weights, activation="linear")
    middle = parts.add(linear, *call.args, kwargs=call.kwargs, shape=call.output.shape)
    return parts.end(activation_of(parts), middle)


_REGULARIZED_IN_PARTS = (Regularize, layers.MultiHeadAttention)


def split_activity_regularizer(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers layer(activity_regularizer=r) to layer and Regularize(r).

    A wrapped layer's own call, which the regularizer would see, is not computed at inference.
    """
    layer = call.layer
    if layer.activity_regularizer is None or len(flatten_values(call.outputs)) > 1:
        return []
    if type(layer) in _REGULARIZED_IN_PARTS or "activity_regularizer" not in layer.get_config():
        return []
    parts, weights, output = PartsBuilder(call, context), context.weights_of(layer), call.output
    plain = context.clone(layer, "plain", weights, activity_regularizer=None)
    name = f"{output.name}_before_regularizer"
    middle = Value(name, output.shape, output.dtype, masked=output.masked)
    parts.add(plain, *call.args, kwargs=call.kwargs, output=middle)
    return parts.end(parts.new("regularizer", Regularize, layer.activity_regularizer), middle)


def activation_of(parts: PartsBuilder) -> Any:
    """Makes a layer of the activation in a layer; copies an activation that is a layer."""
    layer, inner = parts.call.layer, parts.call.layer.activation
    if isinstance(inner, layers.Layer):
        return parts.new("activation", clone, inner, weights=inner.weights)
    return parts.new("activation", layers.Activation, inner, dtype=layer.dtype_policy)


def weights_without_activation(layer: Any, context: LoweringContext) -> list[Any]:
    """Returns a layer's initial weights without those of an activation layer in it."""
    inner = {id(weight) for weight in getattr(layer.activation, "weights", ())}
    return [weight for weight in context.weights_of(layer) if id(weight) not in inner]


def _split_hard_sigmoid(call: Call, context: LoweringContext, slope: float = 0.2) -> list[Call]:
    """Lowers hard_sigmoid to Rescaling(slope, 0.5) and ReLU(1). The default is Keras 2's slope."""
    parts = PartsBuilder(call, context)
    scale = parts.new("scale", layers.Rescaling, slope, 0.5)
    return parts.chain(scale, parts.new("", layers.ReLU, 1.0))


def split_activation_layer(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers an Activation that has no TFLite operator, or that holds a layer."""
    parts, inner = PartsBuilder(call, context), call.layer.activation
    if isinstance(inner, layers.Layer):
        return parts.chain(parts.new("", clone, inner, weights=inner.weights))
    split = ACTIVATIONS.get(inner)
    return split(call, context) if split else []


def split_swish(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers swish to sigmoid and Multiply, as TFLite has no operator for swish."""
    parts, x = PartsBuilder(call, context), call.inputs[0]
    gate = parts.add(parts.new("sigmoid", layers.Activation, "sigmoid"), x, shape=x.shape)
    return parts.end(parts.new("", layers.Multiply), [x, gate])


ACTIVATIONS: dict[Any, Lowering] = {
    keras.activations.swish: split_swish,
    tf.nn.silu: split_swish,
    keras.activations.hard_sigmoid: _split_hard_sigmoid,
    keras_3.hard_sigmoid: partial(_split_hard_sigmoid, slope=1.0 / 6.0),
    keras_3.hard_silu: partial(replace_by, make=HardSwish),
    keras_3.relu6: partial(replace_by, make=layers.ReLU, max_value=6.0),
    keras_3.leaky_relu: partial(replace_by, make=layers.LeakyReLU, alpha=0.2),
    keras_3.celu: partial(replace_by, make=layers.ELU),
}
"""Activation function -> its lowering."""


def _replace_by_hard_swish(match: Match, context: LoweringContext) -> list[Call]:
    x = match.found["x"]
    is_elementwise = x.shape == match.call.output.shape
    return [context.pattern(match.call, HardSwish, x)] if is_elementwise else []


_X = tensor("x")
_GATE = operation("relu6")(_X + 3.0)
HARD_SWISH = Rule(any_of(_X * _GATE / 6.0, _X * (_GATE / 6.0)), _replace_by_hard_swish)
