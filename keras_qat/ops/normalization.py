"""LayerNormalization and GroupNormalization of int8 tensors, computed in 32-bit integers.

For each group of quantized values q that have a common mean, the operators compute

    y = (q - mean) * G * gamma + beta

G is 1 / sqrt(variance + epsilon), from a lookup table. All layers share the table, because it maps
integers to integers. Mean and variance have 16 bits. Only y is rounded to 8 bits.

By default, these layers compute in float if the target supports float.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import trace_once
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.plain_operations import quotient
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.graph.calls import Call
from keras_qat.keras2.backend import keras
from keras_qat.ops.composed import (
    INTEGERS,
    LARGER,
    MOST,
    NO_WIDE,
    PRODUCT,
    SMALLER,
    SUM,
    WIDE,
    Computing,
    Emitting,
    Machine,
    Preparing,
    Quantized,
    integer_params,
    wide_params,
)
from keras_qat.ops.emission import Emission, Shape
from keras_qat.ops.lookup import accept_float
from keras_qat.ops.matmul import ROW_PRODUCTS
from keras_qat.ops.movement import transpose
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.requantize import REQUANTIZE

LARGEST = 2.0**31
"""2^31, the limit of int32 values."""

FINE = 2048
"""Each integer variance below this has its own table entry. Above, 16 variances share an entry."""

LEAST_WEIGHTS = 200.0
"""The largest gamma becomes an integer of at least about 200. A lower limit would make gamma less
precise, and leave more bits for the mean."""


def _tabulate_inverses() -> np.ndarray:
    """Tabulate 32767 / sqrt(variance).

    The entry of a variance v is at min(v, FINE - 1) + max(v / 16, FINE / 16). This is at least
    FINE / 16, so the entries before are unused.
    """
    shared = np.arange(MOST // 16 + 3)[FINE // 16 + 1 :] * 16
    variances = np.concatenate([np.zeros(FINE // 16), np.arange(FINE), shared])
    return np.round(MOST / np.sqrt(np.maximum(variances, 1)))


INVERSES = _tabulate_inverses()


class _View(NamedTuple):
    """The shapes of a tensor at each stage of its normalization.

    Args:
        split: the input's shape, with groups of channels as a separate axis.
        order: the permutation that moves the normalized axes to the end.
        rows: a shape that ends with (1, n). The n values of the last axis have a common mean.
        shape: the shape for the multiplication by gamma.
        weights: the shape of gamma and beta, which broadcasts against `shape`.
    """

    split: Shape
    order: tuple[int, ...]
    rows: Shape
    shape: Shape
    weights: tuple[int, ...]

    @property
    def size(self) -> int:
        size = self.rows[-1]
        assert size is not None
        return size

    @property
    def row_shape(self) -> Shape:
        return *self.rows[:-1], 1


def _arrange(shape: Any, attributes: Attributes) -> _View:
    groups = attributes.get("groups")
    if groups is None:
        count = attributes["axes"]
        lead, size = tuple(shape[:-count]), math.prod(shape[-count:])
        if len(lead) > 1 and lead.count(None) < 2:
            lead = (None if None in lead else math.prod(lead),)
        rows = (*lead, 1, size)
        return _View(rows, tuple(range(len(rows))), rows, rows, (size,))
    batch, *pixels, channels = shape
    count, size = math.prod(pixels), channels // groups
    rows, weights = (batch, groups, 1, count * size), (groups, 1, size)
    shape = (batch, groups, count, size)
    if groups == 1 or count == 1:  # The order of values in memory does not change.
        return _View(shape, (0, 1, 2, 3), rows, shape, weights)
    return _View((batch, count, groups, size), (0, 2, 1, 3), rows, shape, weights)


@dataclasses.dataclass(frozen=True)
class _Stages:
    """The quantization parameters of intermediate results, and the constants of the formula.

    Args:
        mean: parameters of -mean and of q - mean.
        variance: parameters of sums of squared differences, as int16.
        shared: parameters of variances that share table entries: 16 times the scale of `variance`.
        epsilon: the layer's epsilon as an integer, with the scales of `variance` and of `shared`.
        scaled: parameters of y in 32 bits.
        gamma, beta: the weights as integers. None if the layer does not have the weight.
    """

    mean: QuantParams
    variance: QuantParams
    shared: QuantParams
    epsilon: Any
    scaled: QuantParams
    gamma: Any
    beta: Any


def _bits_of_mean(size: int) -> int:
    """Return the number of fractional bits of the mean of `size` values, 0 to 7."""
    most = MOST * min((1.5 * size) ** 0.5, 255.0)
    return min(max(math.floor(math.log2(LARGEST / most / LEAST_WEIGHTS)), 0), 7)


def _find_stages(layer: Any, view: _View, epsilon: float, x: QuantParams) -> _Stages:
    scale, factor = x.as_tensors().scale, 2.0 ** _bits_of_mean(view.size)
    gamma, beta = (
        None if weight is None else tf.reshape(tf.cast(weight, tf.float64), view.weights)
        for weight in (getattr(layer, name, None) for name in ("gamma", "beta"))
    )
    added = tf.minimum(quotient(quotient(epsilon, scale), scale), 1e30)
    variance = quotient(2.0**14 + added, MOST)
    steps = round_half_away(quotient(added, variance))
    # Rounding makes a variance at most two steps too small.
    largest = tf.minimum(
        tf.sqrt(3.0 * view.size * variance), 255.0 / tf.sqrt(tf.maximum(steps - 2.0, 1.0))
    )
    step = quotient(1.0, factor * MOST * tf.sqrt(variance))
    if gamma is not None:
        most = tf.reduce_max(tf.abs(gamma)) * largest * factor * MOST
        if beta is not None:
            most += quotient(tf.reduce_max(tf.abs(beta)), step)
        of_gamma = quotient(most, 0.97 * LARGEST)
        of_gamma = tf.where(of_gamma > 0, of_gamma, tf.ones_like(of_gamma))
        gamma, step = round_half_away(quotient(gamma, of_gamma)), step * of_gamma
    if beta is not None:
        ends = -0.98 * LARGEST, 0.98 * LARGEST
        beta = tf.clip_by_value(round_half_away(quotient(beta, step)), *ends)
    return _Stages(
        mean=wide_params(tf.constant(1.0 / factor, tf.float64)),
        variance=wide_params(variance * view.size),
        shared=wide_params(16.0 * variance * view.size),
        epsilon=[tf.reshape(round_half_away(count), [1]) for count in (steps, steps / 16.0)],
        scaled=QuantParams(single(step), tf.zeros([], tf.float64), 32),
        gamma=gamma,
        beta=beta,
    )


def _invert(m: Machine, difference: Quantized, view: _View, stages: _Stages) -> Quantized:
    """Look up 32767 / sqrt(variance + epsilon), given the differences from the mean."""

    def run(op: Op, inputs: list[Quantized], params: QuantParams) -> Quantized:
        return m.run(op, inputs, params, shape=view.row_shape)

    variance = run(ROW_PRODUCTS, [difference, difference], stages.variance)
    shared = run(REQUANTIZE, [variance], stages.shared)

    def add_epsilon(variance: Quantized, epsilon: Any, end: Op, limit: float) -> Quantized:
        epsilon = m.constant("epsilon", epsilon, INTEGERS)
        result = run(SUM, [m.reinterpret(variance, INTEGERS), epsilon], INTEGERS)
        return run(end, [result, m.constant("limit", np.full(1, limit), INTEGERS)], INTEGERS)

    fine = add_epsilon(variance, stages.epsilon[0], SMALLER, FINE - 1.0)
    coarse = add_epsilon(shared, stages.epsilon[1], LARGER, FINE / 16.0)
    position = run(SUM, [fine, coarse], INTEGERS)
    return m.reinterpret(m.look_up(tf.constant(INVERSES), integer_params(16), position), INTEGERS)


def _normalize(m: Machine, x: Quantized, view: _View, stages: _Stages) -> Quantized:
    """Run the operators of a normalization. `x` has the shape `view.rows`.

    The machine `m` prepares, computes or emits the operators. The result has 32 bits.
    """
    of_one = QuantParams(np.float32(1 / view.size), 0, 16)
    ones = m.constant("minus_ones", np.full((1, view.size), -1.0), of_one)
    mean = m.run(
        ROW_PRODUCTS,
        [m.reinterpret(x, integer_params(16)), ones],
        stages.mean,
        shape=view.row_shape,
    )
    factor = m.constant("factor", np.full(1, 2.0 ** _bits_of_mean(view.size)), INTEGERS)
    fine = m.run(PRODUCT, [m.reinterpret(x, INTEGERS), factor], INTEGERS, shape=view.rows)
    difference = m.run(SUM, [fine, m.reinterpret(mean, INTEGERS)], INTEGERS, shape=view.rows)
    inverse = _invert(m, m.reinterpret(difference, stages.mean), view, stages)
    weights = (("gamma", PRODUCT, stages.gamma), ("beta", SUM, stages.beta))
    steps = [(op, m.constant(name, q, INTEGERS)) for name, op, q in weights if q is not None]
    result = m.run(
        PRODUCT, [difference, inverse], INTEGERS if steps else stages.scaled, shape=view.rows
    )
    result = m.reshape(result, view.shape)
    for op, weight in steps:
        params = stages.scaled if op is steps[-1][0] else INTEGERS
        result = m.run(op, [result, weight], params, shape=view.shape)
    return result


def _prepare(a: Arguments) -> list[Any]:
    view, prepared = _arrange(a.call.inputs[0].shape, a.attributes), list[Any]()
    stages = _find_stages(a.call.layer, view, a.attributes["epsilon"], a.params[0])
    m, x = Preparing(a, prepared), (tf.TensorSpec(view.rows, a.q[0].dtype), a.params[0])
    m.run(REQUANTIZE, [_normalize(m, x, view, stages)], a.output)
    return prepared


@functools.cache
def _make_function(
    view: _View, family: KernelFamily, bits: tuple[int, int], has: tuple[bool, bool]
) -> Callable[[Any, list[Any]], Any]:
    """Return a function that normalizes quantized values: `normalize(x, prepared)`."""
    of_x, output = (QuantParams(None, None, count) for count in bits)
    no_call: Any = None
    stages = _Stages(WIDE, WIDE, WIDE, (None, None), INTEGERS, *(one or None for one in has))

    @trace_once
    def normalize(x: Any, prepared: list[Any]) -> Any:
        m = Computing(Arguments(family, {}, [x], [of_x], output, no_call), prepared)
        source = transpose(tf.reshape(x, [-1, *view.split[1:]]), view.order)
        rows = tf.reshape(source, [-1, *view.rows[1:]]), of_x
        q, _ = m.run(REQUANTIZE, [_normalize(m, rows, view, stages)], output)
        return tf.reshape(transpose(q, view.order), tf.shape(x))

    return normalize


def _compute(a: Arguments) -> Any:
    shape, layer = a.call.inputs[0].shape, a.call.layer
    shape = shape if "groups" in a.attributes else (None, *shape[-a.attributes["axes"] :])
    view = _arrange(shape, a.attributes)
    gamma, beta = (getattr(layer, name, None) is not None for name in ("gamma", "beta"))
    bits = a.params[0].bits, a.output.bits
    return _make_function(view, a.family, bits, (gamma, beta))(a.q[0], a.prepared)


def _emit(e: Emission) -> None:
    view, params = _arrange(e.shape(e.inputs[0]), e.attributes), e.input_params
    stages = _find_stages(e.node.call.layer, view, e.attributes["epsilon"], params)
    source = e.transpose(e.make_reshaped(e.inputs[0], view.split, "split"), view.order)
    rows = e.make_reshaped(source, view.rows, "rows"), params
    result, _ = _normalize(Emitting(e), rows, view, stages)
    (output,) = e.outputs
    target = output
    if view.shape != e.shape(output):
        target = e.temporary("normalized", view.shape, output)
    e.add("QUANTIZE", [result], [target])
    if target != output:
        e.reshape(e.transpose(target, view.order, name="back"), output)


def _accepts(call: Call, attributes: Attributes) -> str | None:
    if NO_WIDE:
        return NO_WIDE
    shape, axes = call.output.shape, _axes(call)
    count = attributes.get("axes", 1)
    if axes != list(range(1, len(shape)))[-count:]:
        return "not along the last axes"
    if None in shape[-count:]:
        return "a size is unknown"
    if len(shape) > 4 and shape.count(None) > 1:
        return "more than one of five sizes is unknown"
    return accept_float(call)


def _axes(call: Call) -> list[int]:
    axes = tf.nest.flatten([getattr(call.layer, "axis", -1)])
    return [axis % len(call.output.shape) for axis in axes]


LAYER_NORM = Op(
    "layer_norm",
    _compute,
    _emit,
    prepare=_prepare,
    doc="normalization along the last axes with 32-bit integers, if the recipe requests it",
    layers=(keras.layers.LayerNormalization,),
    attributes=lambda call: {"epsilon": call.layer.epsilon, "axes": len(_axes(call))},
    needs=("epsilon",),
    defaults={"axes": 1},
    accepts=_accepts,
    max_axes=5,
    integers=(),
    bits=(8,),
    on_request=True,
)

GROUP_NORM = dataclasses.replace(
    LAYER_NORM,
    name="group_norm",
    doc="normalization of channel groups with 32-bit integers, if the recipe requests it",
    layers=(keras.layers.GroupNormalization,),
    attributes=lambda call: {"epsilon": call.layer.epsilon, "groups": call.layer.groups},
    needs=("epsilon", "groups"),
    defaults={},
    accepts=lambda call, attributes: (
        "a size is unknown" if None in call.output.shape[1:] else _accepts(call, attributes)
    ),
)
