"""Lowers activations and softmax layers. Recognizes hard swish and softmax in users' code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values, multiply_sizes
from keras_qat.graph.operations import read_scalar
from keras_qat.helper_layers.elementwise_functions import SoftmaxOfMany
from keras_qat.helper_layers.operations import HardSwish, Regularize
from keras_qat.imports.keras3 import operations as keras_3
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.expand_call import (
    expand_call,
    get_value,
    make_symbol,
    require,
    trace_in_place,
    unwrap,
)
from keras_qat.lowering.patterns import (
    Matcher,
    Pattern,
    Rule,
    any_of,
    argument,
    between,
    operation,
    repeated,
    tensor,
)
from keras_qat.ops.composed import NO_WIDE
from keras_qat.ops.registry import match as match_row
from keras_qat.ops.softmax import FEW_IN_ALL, MANY, SOFTMAX, SOME

_REGULARIZED_INSIDE = (Regularize, layers.MultiHeadAttention)


def split_activation(call: Call, context: LoweringContext) -> list[Call]:
    """Split `Conv2D(activation=f)` into `Conv2D` and `f`. The convolution keeps its name."""
    layer = call.layer
    if layer.activation in (None, keras.activations.linear):
        return []
    parts, weights = PartsBuilder(call, context), get_weights_without_activation(layer, context)
    linear = context.clone(layer, "linear", weights, activation="linear")
    middle = parts.add(linear, *call.args, kwargs=call.kwargs, shape=call.output.shape)
    return parts.end(make_activation(parts), middle)


def split_activity_regularizer(call: Call, context: LoweringContext) -> list[Call]:
    """Split `layer(activity_regularizer=r)` into the layer and `Regularize(r)`.

    Otherwise, the loss is missing at inference, because a `QuantizeWrapper` skips the regularizer.
    """
    layer = call.layer
    if layer.activity_regularizer is None or len(flatten_values(call.outputs)) > 1:
        return []
    if type(layer) in _REGULARIZED_INSIDE or "activity_regularizer" not in layer.get_config():
        return []
    parts, weights, output = PartsBuilder(call, context), context.get_weights(layer), call.output
    plain = context.clone(layer, "plain", weights, activity_regularizer=None)
    name = f"{output.name}_before_regularizer"
    middle = Value(name, output.shape, output.dtype, masked=output.masked)
    parts.add(plain, *call.args, kwargs=call.kwargs, output=middle)
    return parts.end(parts.new("regularizer", Regularize, layer.activity_regularizer), middle)


def make_activation(parts: PartsBuilder) -> layers.Layer:
    """Return a new layer that computes the activation of the call's layer."""
    layer, inner = parts.call.layer, parts.call.layer.activation
    if isinstance(inner, layers.Layer):
        return parts.new("activation", clone, inner, weights=inner.weights)
    return parts.new("activation", layers.Activation, inner, dtype=layer.dtype_policy)


def get_weights_without_activation(
    layer: layers.Layer, context: LoweringContext
) -> list[tf.Variable]:
    inner = {id(weight) for weight in getattr(layer.activation, "weights", ())}
    return [weight for weight in context.get_weights(layer) if id(weight) not in inner]


def split_activation_layer(call: Call, context: LoweringContext) -> list[Call]:
    """Replace `Activation("swish")` by layers, and `Activation(layer)` by a copy of `layer`."""
    inner = call.layer.activation
    if isinstance(inner, layers.Layer):
        parts = PartsBuilder(call, context)
        return parts.chain(parts.new("", clone, inner, weights=inner.weights))
    return expand_call(call, ACTIVATIONS[inner], context) if inner in ACTIVATIONS else []


def swish(x: tf.Tensor) -> tf.Tensor:
    return layers.Multiply()([x, layers.Activation("sigmoid", name="sigmoid")(x)])


def _hard_sigmoid(x: tf.Tensor, slope: float) -> tf.Tensor:
    return layers.ReLU(1.0)(layers.Rescaling(slope, 0.5, name="scale")(x))


ACTIVATIONS: dict[Callable[..., tf.Tensor], Callable[..., tf.Tensor]] = {
    keras.activations.swish: swish,
    tf.nn.silu: swish,
    keras.activations.hard_sigmoid: partial(_hard_sigmoid, slope=0.2),
    keras_3.hard_sigmoid: partial(_hard_sigmoid, slope=1.0 / 6.0),
    keras_3.hard_silu: lambda x: HardSwish()(x),
    keras_3.relu6: lambda x: layers.ReLU(6.0)(x),
    keras_3.leaky_relu: lambda x: layers.LeakyReLU(0.2)(x),
    keras_3.celu: lambda x: layers.ELU()(x),
}
"""Maps an activation function to a function that computes it with layers."""

_X = tensor("x")
_GATE = operation("relu6")(_X + 3.0)
HARD_SWISH = Rule(any_of(_X * _GATE / 6.0, _X * (_GATE / 6.0)), lambda x: HardSwish()(x))

_LEAST = between(0.0, 1e-5)
"""Matches a small constant, such as 1e-7, that prevents a division by 0."""

_add_axes = operation("expand_dims", "stop_gradient")
_exp, _sum = operation("exp"), operation("reduce_sum")


def _keep_from_0(y: Pattern) -> Pattern:
    return any_of(_add_axes(y), y + _LEAST, operation("maximum")(y, _LEAST))


_LARGEST = operation("reduce_max")(repeated(_add_axes, _X), argument(""))
_BELOW = _X - repeated(_add_axes, _LARGEST).named("largest")
_TOTAL_BELOW, _TOTAL = (_sum(_exp(x), argument("axis")) for x in (_BELOW, _X))


def _softmax(
    x: tf.Tensor, axis: object, total: tf.Tensor, largest: tf.Tensor | None = None
) -> tf.Tensor:
    axis = _find_single_axis(x, axis)
    reduced = [*x.shape[:axis], 1, *x.shape[axis + 1 :]]
    require(all(y is None or y.shape == reduced for y in (total, largest)))
    return layers.Softmax(axis)(x)


SOFTMAX_BY_HAND = Rule(
    any_of(
        _exp(_BELOW) / repeated(_keep_from_0, _TOTAL_BELOW).named("total"),
        _exp(_X) / repeated(_add_axes, _TOTAL).named("total"),
    ),
    _softmax,
)
"""Replaces exp(x - max(x)) / sum(exp(x - max(x))) by one Softmax. An epsilon in the divisor is
ignored, because the sum is at least 1."""


def compute_log_sum(x: tf.Tensor, axis: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return max(x), d = x - max(x), and log(sum(exp(d)))."""
    largest = tf.reduce_max(x, axis, keepdims=True, name="largest")
    below = tf.subtract(x, largest, name="below")
    total = tf.reduce_sum(tf.exp(below, name="exp"), axis, keepdims=True, name="total")
    return largest, below, tf.math.log(total, name="log")


def _log_sum_exp(x: tf.Tensor, axis: object, total: tf.Tensor) -> tf.Tensor:
    before = get_value(x).producer
    require(before is None or not any(Matcher().find(_BELOW, before)))
    axis = _find_single_axis(x, axis)
    largest, _, logarithm = compute_log_sum(x, axis)
    if total.shape == largest.shape:
        return tf.add(largest, logarithm)
    return tf.squeeze(tf.add(largest, logarithm, name="sum"), axis)


LOG_SUM_EXP = Rule(operation("log")(_TOTAL.named("total")), _log_sum_exp)
"""Replaces log(sum(exp(x))) by max(x) + log(sum(exp(x - max(x)))), which suits 8 bits better."""


def _find_single_axis(x: tf.Tensor, axes: object) -> int:
    """Return the only axis in `axes`. Raise `CannotExpand` if there are several."""
    axis, *others = tf.nest.flatten(axes)
    require(not others)
    return int(unwrap(read_scalar(axis))) % len(x.shape)


def merge_softmax_axes(layer: layers.Softmax, x: tf.Tensor) -> tf.Tensor:
    """Merge several axes into one, and compute the softmax over the merged axis."""
    require(isinstance(layer.axis, (list, tuple)) and None not in x.shape[1:])
    rank = len(x.shape)
    axes = sorted(axis % rank for axis in layer.axis)
    require(len(axes) > 1 and axes[0] > 0)
    order = [axis for axis in range(1, rank) if axis not in axes] + axes
    sizes = [x.shape[axis] for axis in order]
    y = layers.Permute(order, name="in_order")(x)
    y = layers.Reshape((*sizes[: -len(axes)], -1), name="flat")(y)
    y = layers.Reshape(sizes, name="shape")(layers.Softmax(-1, name="softmax")(y))
    return layers.Permute([order.index(axis) + 1 for axis in range(1, rank)])(y)


def widen_softmax(call: Call, context: LoweringContext) -> list[Call]:
    """Replace a softmax over many values by `SoftmaxOfMany`, which TFLite computes in 16 bits."""
    op, attributes, _ = match_row(call)
    if op is not SOFTMAX or NO_WIDE:
        return []
    axis, size = attributes["axis"], multiply_sizes(call.output.shape[1:])
    count = call.output.shape[axis] or 0
    is_cheap = context.has_int16 and size is not None and size <= FEW_IN_ALL
    if count <= (SOME if is_cheap else MANY):
        return []
    return trace_in_place(call, lambda: SoftmaxOfMany(axis)(make_symbol(call.inputs[0])), context)
