"""LayerNormalization, GroupNormalization: parts in 16 bits between tensors of 8.

The differences from the mean, their squares, the variance and the normalized values have 16 bits;
1 / sqrt(variance + epsilon) is looked up in a table. What each part can reach follows from the
range of the input, so that none needs a range of its own.

Layers are these operators on request: runtimes that compute in float do so much faster.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic.as_written import quotient
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import keras
from keras_qat.ops.composed import (
    MOST,
    WIDE,
    Computing,
    Machine,
    Number,
    Preparing,
    Writing,
    wide_params,
    wide_scale_of,
)
from keras_qat.ops.elementwise import ADD, MULTIPLY, SUBTRACT
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import of_reals
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.pooling import MEAN
from keras_qat.ops.requantize import REQUANTIZE
from keras_qat.ops.weighted_sums import RECENT

LARGEST = 64.0
"""Largest normalized value: that of a single value among 4095 zeros."""


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The quantization parameters of all parts, and the constants.

    Args:
        x: parameters of the input in 16 bits, of its mean and of the differences from it: 1/128 of
            its 8-bit scale.
        squares: of the squared differences, which reach the square of the input's range.
        variance: of the variance, at most a quarter of the largest square.
        inverse: of 1 / sqrt(variance + epsilon).
        normalized: of the normalized values, which reach the square root of their number, or
            `LARGEST`.
        scaled: of the values times gamma plus beta, as far as the output's range reaches.
        table: 1 / sqrt(variance + epsilon) for each variance.
        gamma, beta: quantized values with their parameters; None without such a weight.
    """

    x: QuantParams
    squares: QuantParams
    variance: QuantParams
    inverse: QuantParams
    normalized: QuantParams
    scaled: QuantParams
    table: Any
    gamma: Number | None
    beta: Number | None


class _View(NamedTuple):
    """Shape in which values are normalized.

    Args:
        shape: the shape, in which values that are normalized together have axes of their own.
        axes: these axes.
        weights: the shape of gamma and beta.
    """

    shape: tuple[int | None, ...]
    axes: tuple[int, ...]
    weights: tuple[int, ...]

    @property
    def reduced(self) -> tuple[int | None, ...]:
        """The shape with size 1 along the normalized axes."""
        return tuple(1 if i in self.axes else size for i, size in enumerate(self.shape))

    @property
    def size(self) -> int:
        """Number of values that are normalized together."""
        return math.prod(self.shape[axis] or 0 for axis in self.axes)


def _view(shape: Any, attributes: Attributes) -> _View:
    batch, *pixels, channels = shape
    groups = attributes.get("groups")
    if groups is None:
        return _View(tuple(shape), (len(shape) - 1,), (channels,))
    sizes = groups, channels // groups
    return _View((batch, math.prod(pixels), *sizes), (1, 3), sizes)


def _quantized(weight: Any, shape: tuple[int, ...]) -> Number | None:
    if weight is None:
        return None
    values = tf.reshape(tf.cast(weight, tf.float64), shape)
    largest = tf.reduce_max(tf.abs(values))
    params = wide_params(quotient(tf.where(largest > 0, largest, tf.ones_like(largest)), MOST))
    return round_half_away(values / params.scale), params


def _parts(layer: Any, view: _View, epsilon: float, x: QuantParams, output: QuantParams) -> _Parts:
    x, output = x.as_tensors(), output.as_tensors()
    weights = (getattr(layer, name, None) for name in ("gamma", "beta"))
    gamma, beta = (_quantized(weight, view.weights) for weight in weights)
    squares = wide_params(tf.clip_by_value(quotient(tf.square(255.0 * x.scale), MOST), 1e-30, 1e30))
    variance = wide_params(squares.scale * 0.25)
    inverse = wide_params(quotient(quotient(1.0, tf.sqrt(variance.scale + epsilon)), MOST))
    variances = tf.range(2.0**15, dtype=tf.float64) * variance.scale
    inverses = quotient(1.0, tf.sqrt(variances + max(epsilon, 1e-60)))
    table = round_half_away(quotient(inverses, inverse.scale))
    normalized = wide_params(tf.constant(min(view.size**0.5, LARGEST) / MOST, tf.float64))
    reach = wide_scale_of(output)
    if beta is not None:
        reach += beta[1].scale
    if gamma is not None:  # Below half of it, products would overflow.
        reach = tf.maximum(reach, 2.0 * normalized.scale * gamma[1].scale)
    return _Parts(
        x=wide_params(x.scale * 2.0**-7),
        squares=squares,
        variance=variance,
        inverse=inverse,
        normalized=normalized,
        scaled=wide_params(reach),
        table=tf.minimum(table, MOST),
        gamma=gamma,
        beta=beta,
    )


def _normalized(m: Machine, x: Number, view: _View, parts: _Parts) -> Number:
    """Runs the rows that compute the parts, up to the result in 16 bits."""
    along = {"axes": view.axes, "keepdims": True}
    wide = m.run(REQUANTIZE, [x], parts.x)
    mean = m.run(MEAN, [wide], parts.x, attributes=along, shape=view.reduced)
    difference = m.run(SUBTRACT, [wide, mean], parts.x, shape=view.shape)
    squares = m.run(MULTIPLY, [difference, difference], parts.squares)
    variance = m.run(MEAN, [squares], parts.variance, attributes=along, shape=view.reduced)
    inverse = m.looked_up(parts.table, parts.inverse, variance)
    result = m.run(MULTIPLY, [difference, inverse], parts.normalized, shape=view.shape)
    for name, op, weight in (("gamma", MULTIPLY, parts.gamma), ("beta", ADD, parts.beta)):
        if weight is not None:
            factors = m.constant(name, *weight)
            result = m.run(op, [result, factors], parts.scaled, shape=view.shape)
    return result


def _prepare(a: Arguments) -> list[Any]:
    view, numbers = _view(a.call.inputs[0].shape, a.attributes), list[Any]()
    parts = _parts(a.call.layer, view, a.attributes["epsilon"], a.params[0], a.output)
    m, x = Preparing(a, numbers), tf.TensorSpec(view.shape, a.q[0].dtype)
    m.run(REQUANTIZE, [_normalized(m, (x, a.params[0]), view, parts)], a.output)
    return numbers


def _compute(a: Arguments) -> Any:
    (x,), layer = a.q, a.call.layer
    view, m = _view(a.call.inputs[0].shape, a.attributes), Computing(a, a.numbers)
    weights = (getattr(layer, name, None) for name in ("gamma", "beta"))
    gamma, beta = (None if weight is None else (None, WIDE) for weight in weights)
    parts = _Parts(WIDE, WIDE, WIDE, WIDE, WIDE, WIDE, None, gamma, beta)
    source = x
    if view.shape != a.call.inputs[0].shape:
        source = tf.reshape(x, [-1, *view.shape[1:]])
    result = m.run(REQUANTIZE, [_normalized(m, (source, a.params[0]), view, parts)], a.output)
    return tf.reshape(result[0], tf.shape(x))


def _emit(e: Emission) -> None:
    view = _view(e.shape(e.inputs[0]), e.attributes)
    parts = _parts(e.node.call.layer, view, e.attributes["epsilon"], e.input_params, e.params)
    source, (target,) = e.reshaped(e.inputs[0], view.shape, "groups"), e.outputs
    if view.shape != e.shape(target):
        target = e.temporary("of_groups", view.shape, target)
    result, _ = _normalized(Writing(e), (source, e.input_params), view, parts)
    e.add("QUANTIZE", [result], [target])
    if target not in e.outputs:
        e.reshape(target, e.outputs[0])


def _accepts(call: Call, attributes: Attributes) -> str | None:
    if not RECENT:
        return "this TensorFlow has no QUANTIZE from int8 to int16"
    shape, axes = call.output.shape, tf.nest.flatten([getattr(call.layer, "axis", -1)])
    if [axis % len(shape) for axis in axes] != [len(shape) - 1]:
        return "not along the last axis alone"
    return "of an open size" if shape[-1] is None else of_reals(call)


LAYER_NORM = Op(
    "layer_norm",
    _compute,
    _emit,
    prepare=_prepare,
    doc="normalization along the last axis, in parts of 16 bits, where asked for",
    layers=(keras.layers.LayerNormalization,),
    attributes=lambda call: {"epsilon": call.layer.epsilon},
    needs=("epsilon",),
    accepts=_accepts,
    max_axes=5,
    integers=(),
    bits=(8,),
    on_request=True,
)

GROUP_NORM = dataclasses.replace(
    LAYER_NORM,
    name="group_norm",
    doc="normalization of groups of channels, in parts of 16 bits, where asked for",
    layers=(keras.layers.GroupNormalization,),
    attributes=lambda call: {"epsilon": call.layer.epsilon, "groups": call.layer.groups},
    needs=("epsilon", "groups"),
    accepts=lambda call, attributes: (
        "of an open size" if None in call.output.shape[1:] else _accepts(call, attributes)
    ),
)
