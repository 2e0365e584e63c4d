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

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.as_written import quotient
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import keras
from keras_qat.ops.elementwise import ADD, MULTIPLY, SUBTRACT
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import of_reals
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.pooling import MEAN
from keras_qat.ops.requantize import REQUANTIZE
from keras_qat.ops.weighted_sums import RECENT
from keras_qat.tflite.schema import TYPES

__all__ = ["GROUP_NORM", "LAYER_NORM"]

MOST = 2.0**15 - 1
"""The largest quantized value of 16 bits."""

LARGEST = 64.0
"""Largest normalized value: that of the only value of 4096 that is not zero."""


Part = tuple[Any, QuantParams]
"""Quantized values and what they stand for."""


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The quantization parameters of all parts, and the constants.

    Args:
        x: of the input in 16 bits, its mean and the differences from it: 1/128 of its 8 bits.
        squares: of the squared differences, which reach the square of the input's range.
        variance: a quarter of that is the largest variance of numbers in a range.
        inverse: of 1 / sqrt(variance + epsilon).
        normalized: which reach the square root of how many they are, or `LARGEST`.
        scaled: of what gamma and beta make of them, as far as it does not leave the output's range.
        table: the inverse of each variance.
        gamma, beta: as quantized values and their parameters; None for none.
    """

    x: QuantParams
    squares: QuantParams
    variance: QuantParams
    inverse: QuantParams
    normalized: QuantParams
    scaled: QuantParams
    table: Any
    gamma: Part | None
    beta: Part | None


def _wide(scale: Any) -> QuantParams:
    return QuantParams(single(scale), tf.zeros([], tf.float64), 16)


class _View(NamedTuple):
    """Shape in which values are normalized.

    Args:
        shape: that in which it is computed: numbers that belong together have axes of their own.
        axes: those.
        weights: the shape of gamma and beta.
    """

    shape: tuple[int | None, ...]
    axes: tuple[int, ...]
    weights: tuple[int, ...]

    @property
    def reduced(self) -> tuple[int | None, ...]:
        """The shape with one number for those that belong together."""
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


def _quantized(weight: Any, shape: tuple[int, ...]) -> Part | None:
    if weight is None:
        return None
    values = tf.reshape(tf.cast(weight, tf.float64), shape)
    largest = tf.reduce_max(tf.abs(values))
    params = _wide(quotient(tf.where(largest > 0, largest, tf.ones_like(largest)), MOST))
    return round_half_away(values / params.scale), params


def _parts(layer: Any, view: _View, epsilon: float, x: QuantParams, output: QuantParams) -> _Parts:
    x, output = x.as_tensors(), output.as_tensors()
    weights = (getattr(layer, name, None) for name in ("gamma", "beta"))
    gamma, beta = (_quantized(weight, view.weights) for weight in weights)
    squares = _wide(tf.clip_by_value(quotient(tf.square(255.0 * x.scale), MOST), 1e-30, 1e30))
    variance = _wide(squares.scale * 0.25)
    inverse = _wide(quotient(quotient(1.0, tf.sqrt(variance.scale + epsilon)), MOST))
    variances = tf.range(2.0**15, dtype=tf.float64) * variance.scale
    inverses = quotient(1.0, tf.sqrt(variances + max(epsilon, 1e-60)))
    table = round_half_away(quotient(inverses, inverse.scale))
    normalized = _wide(tf.constant(min(view.size**0.5, LARGEST) / MOST, tf.float64))
    ends = [tf.abs(end - output.zero_point) for end in (output.lowest, output.highest)]
    reach = quotient(tf.maximum(*ends) * output.scale, MOST)
    if beta is not None:
        reach += beta[1].scale
    if gamma is not None:  # Below half of it, products would overflow.
        reach = tf.maximum(reach, 2.0 * normalized.scale * gamma[1].scale)
    return _Parts(
        x=_wide(x.scale * 2.0**-7),
        squares=squares,
        variance=variance,
        inverse=inverse,
        normalized=normalized,
        scaled=_wide(reach),
        table=tf.minimum(table, MOST),
        gamma=gamma,
        beta=beta,
    )


ROWS = {
    "source": REQUANTIZE,
    "mean": MEAN,
    "difference": SUBTRACT,
    "squares": MULTIPLY,
    "variance": MEAN,
    "normalized": MULTIPLY,
    "scaled": MULTIPLY,
    "shifted": ADD,
    "result": REQUANTIZE,
}
"""Part -> the row that computes it."""


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """The numbers of a normalization.

    Args:
        rows: of what computes each part.
        table: the inverse of each variance.
        gamma, beta: quantized values, None for none.
    """

    rows: dict[str, Any]
    table: Any
    gamma: Any
    beta: Any


def _prepare(a: Arguments) -> _Numbers:
    view = _view(a.call.inputs[0].shape, a.attributes)
    parts = _parts(a.call.layer, view, a.attributes["epsilon"], a.params[0], a.output)
    given: dict[str, tuple[QuantParams, list[QuantParams]]] = {
        "source": (parts.x, a.params),
        "mean": (parts.x, [parts.x]),
        "difference": (parts.x, [parts.x, parts.x]),
        "squares": (parts.squares, [parts.x, parts.x]),
        "variance": (parts.variance, [parts.squares]),
        "normalized": (parts.normalized, [parts.x, parts.inverse]),
    }
    last = parts.normalized
    for name, weight in (("scaled", parts.gamma), ("shifted", parts.beta)):
        if weight is not None:
            given[name], last = (parts.scaled, [last, weight[1]]), parts.scaled
    given["result"] = a.output, [last]
    rows = {}
    for name, (output, params) in given.items():
        q = [tf.TensorSpec(None, tf.float64)] * len(params)
        part = _part(a, view, name, q, params, output)
        rows[name] = ROWS[name].prepared(part).numbers
    gamma, beta = (part and part[0] for part in (parts.gamma, parts.beta))
    return _Numbers(rows, parts.table, gamma, beta)


def _part(
    a: Arguments, view: _View, name: str, q: list[Any], params: list[Any], output: QuantParams
) -> Arguments:
    """Returns the arguments of the row that computes a part."""
    sign = -1 if ROWS[name] is SUBTRACT else 1
    options = {"axes": view.axes, "keepdims": True, "sign": sign}
    return dataclasses.replace(a, q=q, params=params, output=output, attributes=options)


def _compute(a: Arguments) -> Any:
    (x,), numbers = a.q, a.numbers
    view = _view(a.call.inputs[0].shape, a.attributes)
    wide = tf.cast(x, tf.float64)
    if view.shape != a.call.inputs[0].shape:
        wide = tf.reshape(wide, [-1, *view.shape[1:]])
    of_16_bits = QuantParams(None, None, 16)

    def step(name: str, *q: Any) -> Any:
        params = a.params if name == "source" else [of_16_bits] * len(q)
        output = a.output if name == "result" else of_16_bits
        part = _part(a, view, name, list(q), params, output)
        result = ROWS[name].compute(dataclasses.replace(part, numbers=numbers.rows[name]))
        return result if name == "result" else tf.clip_by_value(result, -MOST - 1, MOST)

    source = step("source", wide)
    difference = step("difference", source, step("mean", source))
    variance = step("variance", step("squares", difference, difference))
    inverse = tf.gather(numbers.table, tf.cast(variance, tf.int32))
    result = step("normalized", difference, inverse)
    for name, weight in (("scaled", numbers.gamma), ("shifted", numbers.beta)):
        if weight is not None:
            result = step(name, result, weight)
    return tf.cast(tf.reshape(step("result", result), tf.shape(x)), x.dtype)


def _emit(e: Emission) -> None:
    (x,), output = e.node.inputs, e.node.output.params
    assert x.params is not None
    assert output is not None
    view = _view(e.shape(e.inputs[0]), e.attributes)
    parts = _parts(e.node.call.layer, view, e.attributes["epsilon"], x.params, output)
    source, (target,) = e.reshaped(e.inputs[0], view.shape, "groups"), e.outputs
    if view.shape != e.shape(target):
        target = e.temporary("of_groups", view.shape, target)

    def number(params: QuantParams) -> QuantParams:
        return QuantParams(np.float32(params.scale), 0, 16)

    def tensor(name: str, params: QuantParams, reduced: bool = False) -> int:
        return e.temporary(name, view.reduced if reduced else view.shape, number(params))

    def constant(name: str, values: Any, params: QuantParams) -> int:
        return e.constant(name, np.asarray(values).astype(np.int16), number(params))

    axis = e.constant("axis", view.axes)
    wide, mean = tensor("wide", parts.x), tensor("mean", parts.x, reduced=True)
    e.add("QUANTIZE", [source], [wide])
    e.add("MEAN", [wide, axis], [mean], keepDims=True)
    difference, squares = tensor("difference", parts.x), tensor("squares", parts.squares)
    e.add("SUB", [wide, mean], [difference], potScaleInt16=False)
    e.add("MUL", [difference, difference], [squares])
    variance = tensor("variance", parts.variance, reduced=True)
    e.add("MEAN", [squares, axis], [variance], keepDims=True)
    places = e.temporary("places", e.shape(variance), "int32")
    e.add("CAST", [variance], [places], inDataType=TYPES["int16"], outDataType=TYPES["int32"])
    inverse = tensor("inverse", parts.inverse, reduced=True)
    e.add("GATHER", [constant("table", parts.table, parts.inverse), places], [inverse], axis=0)
    result = tensor("normalized", parts.normalized)
    e.add("MUL", [difference, inverse], [result])
    if parts.gamma is not None:
        scaled = tensor("scaled", parts.scaled)
        e.add("MUL", [result, constant("gamma", *parts.gamma)], [scaled])
        result = scaled
    if parts.beta is not None:
        shifted = tensor("shifted", parts.scaled)
        e.add("ADD", [result, constant("beta", *parts.beta)], [shifted], potScaleInt16=False)
        result = shifted
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


def _accepts_groups(call: Call, attributes: Attributes) -> str | None:
    return "of an open size" if None in call.output.shape[1:] else _accepts(call, attributes)


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
    accepts=_accepts_groups,
)
