"""Softmax and L2 normalization. XNNPACK has kernels for neither, so TFLite's kernels run.

TFLite has four softmax kernels. Two look up exponentials in a float32 table (x86) or in a uint16
table (64-bit ARM). The reference kernel computes them in fixed point. The fourth is for int16.

Softmax over many values (`SOFTMAX_OF_MANY`) computes in 16 bits, and its output has an observed
range. In 8 bits, 512 nearly equal values would lose precision: each result is 1/512, but an 8-bit
step is 1/256. TFLite's 8-bit reference kernel also aborts if exponentials add up to 512 or more.
With TFLite's optimized kernels, however, 8 bits are five times as fast. Softmax over fewer than 512
values therefore keeps 8 bits, unless the tensor is small.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import Predicate, cond, trace_once
from keras_qat.arithmetic.fixed_point import (
    FixedPoint,
    divide,
    exponential,
    get_exponent,
    high_product,
    inverse_square_root,
    multiply,
    reciprocal,
    saturate,
    shift,
    shift_back,
    to_fixed_point,
)
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.plain_operations import gather, must_not_fuse, quotient
from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.graph.calls import Call
from keras_qat.graph.operations import get_argument, get_operands, is_operation, read_scalar
from keras_qat.helper_layers.elementwise_functions import SoftmaxOfMany
from keras_qat.keras2.backend import keras, layers
from keras_qat.ops.composed import NO_WIDE, WIDE, Machine, Quantized, compose, wide_params
from keras_qat.ops.emission import Emission, Shape
from keras_qat.ops.lookup import accept_float
from keras_qat.ops.op import Arguments, Attributes, FixedRange, Op
from keras_qat.ops.requantize import REQUANTIZE, Multiplier, prepare_requantization, requantize

HIGHEST = 2**15 - 1
"""The largest int16 value. In the tables of the int16 kernel, it represents 1."""

LEAST_SCALE = 2.0**-25
"""The smallest scale of int8 inputs in files. At half this scale, the reference kernel aborts."""


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """The constants of an 8-bit softmax.

    Args:
        is_wider: whether the input's scale is below `LEAST_SCALE`, so the input must be
            requantized.
        conversion: the multiplier for this requantization.
        table: the exponentials of differences from the maximum. None for the fixed-point kernel.
        output: the output's scale. None for the fixed-point kernel.
        factor: the factor for differences from the maximum. Only for the fixed-point kernel.
    """

    is_wider: Predicate
    conversion: Multiplier
    table: Any = None
    output: Any = None
    factor: Any = None


def _prepare(a: Arguments) -> FixedPoint | _Prepared:
    (x,) = a.params
    if a.wide:
        return to_fixed_point(quotient(single(x.scale), 10.0 / 65535.0))
    wider = dataclasses.replace(x, scale=tf.maximum(x.scale, LEAST_SCALE))
    is_wider, conversion = x.scale < LEAST_SCALE, prepare_requantization(a.family, x, wider)
    if a.family.softmax != "fixed_point":
        differences = -wider.scale * tf.range(256, dtype=tf.float64)
        table = tf.cast(tf.exp(single(differences)), tf.float32)
        if a.family.softmax == "uint16_table":
            table = tf.cast(single(tf.cast(table, tf.float64) * 65535.0) + 0.5, tf.int64)
        output = tf.cast(a.output.scale, tf.float32)
        return _Prepared(is_wider, conversion, table, output)
    multiplier, bits = to_fixed_point(tf.minimum(wider.scale * 2.0**26, 2.0**31 - 1))
    return _Prepared(is_wider, conversion, factor=(multiplier, tf.maximum(bits, 0)))


def _compute(a: Arguments) -> tf.Tensor:
    (q,), prepared, axis = a.q, a.prepared, a.attributes["axis"]
    if a.wide:
        return tf.cast(_compute_int16(a.family, tf.cast(q, tf.int64), prepared, axis), q.dtype)
    q = cond(
        prepared.is_wider,
        lambda: requantize(a.q[0], prepared.conversion),
        lambda: tf.identity(a.q[0]),
    )
    if a.family.softmax == "fixed_point":
        return tf.cast(_compute_fixed_point(tf.cast(q, tf.int64), prepared.factor, axis), q.dtype)
    below = tf.reduce_max(q, axis, keepdims=True) - q
    exponentials = gather(prepared.table, tf.cast(below, tf.int32))
    if a.family.softmax == "float32":  # TFLite's optimized kernel for x86.
        total = _sum_in_order(exponentials, axis)
        return tf.floor(exponentials * quotient(1.0, total * prepared.output) + 0.5)
    # The optimized kernel for 64-bit ARM adds exponentials as integers in 65535ths.
    total = tf.cast(tf.reduce_sum(exponentials, axis, keepdims=True), tf.float32)
    inverse = to_fixed_point(quotient(1.0, total * prepared.output))
    return tf.cast(multiply(exponentials, inverse), q.dtype)


MOST_ROWS = 256
"""The maximum number of values in a sum by `_add_rows`. Each value needs one operation."""

FEW_SUMS = 16
"""If an example has fewer sums than this, `tf.cumsum` is faster than `_add_rows`."""


def _sum_in_order(x: tf.Tensor, axis: int) -> tf.Tensor:
    """Sum values along an axis one after another. In another order, float32 rounds differently."""
    count, size = x.shape[axis], x.shape[1:].num_elements()
    if count and size and FEW_SUMS * count <= size and count <= MOST_ROWS and not must_not_fuse():
        return _add_rows(x, axis)
    sums = tf.cumsum(x, axis)
    return tf.gather(sums, tf.shape(sums)[axis] + tf.constant([-1]), axis=axis)


@trace_once
def _add_rows(x: tf.Tensor, axis: int) -> tf.Tensor:
    """Sum values along an axis one after another. For many sums, this is faster than `tf.cumsum`.

    The values are negated and subtracted. TensorFlow's graph optimizer would reorder additions.
    """
    axes = list(range(x.shape.rank))
    axes.insert(0, axes.pop(axis))
    rows = -tf.transpose(x, axes)
    total = -rows[0]
    for index in range(1, rows.shape[0]):
        total -= rows[index]
    return tf.expand_dims(total, axis)


def _compute_fixed_point(q: tf.Tensor, factor: FixedPoint, axis: int) -> tf.Tensor:
    """Compute softmax like TFLite's reference kernel.

    Integers in the format Qn have a sign, n integer bits and 31 - n fractional bits. `factor`
    converts differences from the maximum to Q5.
    """
    multiplier, bits = factor
    radius = shift_back(tf.constant(31 * 2**26, tf.int64), bits)
    below = q - tf.reduce_max(q, axis, keepdims=True)
    counts = below >= -radius
    zero = tf.zeros_like(below)
    differences = high_product(shift(tf.where(counts, below, zero), bits), multiplier)
    exponentials = exponential(differences, 5)
    terms = tf.where(counts, divide(exponentials, tf.constant(12, tf.int64)), zero)
    sums = tf.reduce_sum(terms, axis, keepdims=True)
    # The sum, in Q12, is 2^length * (1 + fraction).
    length = get_exponent(tf.cast(sums, tf.float64)) + 1
    inverse = saturate(shift(reciprocal(shift(sums, 32 - length) - 2**31), 1), 31)
    quantized = divide(high_product(inverse, exponentials), length + 3)
    return tf.where(counts, quantized, zero)


def _compute_int16(family: KernelFamily, q: tf.Tensor, factor: FixedPoint, axis: int) -> tf.Tensor:
    """Compute softmax like the int16 kernels, which interpolate exp and 1 / (1 + x) in tables.

    TFLite computes the tables in float64, and TFLite Micro in float32.
    """
    precise: Any = np.dtype(family.int16_softmax_tables).type
    below = q - tf.reduce_max(q, axis, keepdims=True)
    below = multiply(below, factor)
    exponentials = _interpolate(
        saturate(below + HIGHEST, 15), _tabulate(np.exp, 10 / 65535, HIGHEST, precise)
    )
    sums = tf.reduce_sum(exponentials, axis, keepdims=True)
    length = get_exponent(tf.cast(sums, tf.float64)) + 1
    normalized = shift_back(shift(sums, 31 - length) + 2**13, 14)
    table = _tabulate(_one_over_one_plus, 1 / 65535, -(2**15), precise)
    inverse = _interpolate(saturate(normalized - 2**15 - 2**16, 15), table)
    bits = length - 1
    half = shift(tf.ones_like(bits), bits - 1)
    return tf.clip_by_value(shift_back(exponentials * inverse + half, bits), 0, HIGHEST)


def _interpolate(x: tf.Tensor, table: np.ndarray) -> tf.Tensor:
    """Look up int16 values in a table of 513 entries, with linear interpolation."""
    values = tf.constant(table, tf.int64)
    index = shift_back(x, 7) + 256
    low, high = gather(values, index), gather(values, index + 1)
    return low + shift_back((high - low) * (x & 127) + 64, 7)


def _one_over_one_plus(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + x)


@functools.cache
def _tabulate(
    function: Callable[[np.ndarray], np.ndarray], scale: float, zero_point: int, precise: Any
) -> np.ndarray:
    """Tabulate a function for `_interpolate`. Results are int16 with 15 fractional bits.

    As in TFLite, half of the interpolation error after each entry is subtracted from the entry.
    """
    low, high = precise(scale * (-(2**15) - zero_point)), precise(scale * (HIGHEST - zero_point))
    width = (high - low) / precise(512)
    inverse = precise(65536 / (2 / 65535 * 65535))
    steps = np.arange(513).astype(precise)
    points = low + steps[:-1] * width
    here = _round(function(points) * inverse)
    next_values = function(low + steps[1:] * width) * inverse
    middle = _round(function(points + width / 2) * inverse)
    error = _round((next_values + here) / 2) - middle
    values = np.append(here - _round(error / 2), _round(function(high) * inverse))
    return np.clip(values, -(2**15), HIGHEST).astype(np.int64)


def _round(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def _attributes(call: Call) -> Attributes:
    axis = getattr(call.layer, "axis", -1)
    if is_operation(call.layer):
        axis = get_argument(call, "axis")
    axes = [-1 if item is None else int(item) for item in tf.nest.flatten([axis])]
    rank = len(call.output.shape)
    counted = [item if item < 0 else item - rank for item in axes]
    return {"axis": counted[0] if len(counted) == 1 else tuple(counted)}


def _accepts(call: Call, attributes: Attributes) -> str | None:
    if not isinstance(attributes["axis"], int):
        return "several axes"
    is_layer = isinstance(call.layer, layers.Softmax)
    if len(call.inputs) > 1 or (is_layer and call.inputs[0].masked):
        return "a mask"
    if attributes["axis"] == -len(call.output.shape):
        return "along the batch axis"
    return accept_float(call)


def _widen_scale(e: Emission) -> int:
    """Return the input. If its scale is below `LEAST_SCALE`, add a QUANTIZE to `LEAST_SCALE`."""
    (source,), params = e.inputs, e.node.inputs[0].params
    assert params is not None
    if params.bits == 16 or params.scale >= LEAST_SCALE:
        return source
    params = dataclasses.replace(params, scale=np.float32(LEAST_SCALE))
    wider = e.temporary("wider", e.shape(source), params)
    e.builder.quantize(source, wider)
    return wider


def _emit(e: Emission) -> None:
    """Add a SOFTMAX. If `axis` is not the last axis, also add a TRANSPOSE before and after it."""
    axis, source, (target,) = e.attributes["axis"], _widen_scale(e), e.outputs
    order = list(range(len(e.shape(source))))
    order[axis], order[-1] = order[-1], order[axis]
    moved = e.transpose(source, order)
    result = target if axis == -1 else e.temporary("softmax", e.shape(moved), target)
    e.add("SOFTMAX", [moved], [result], beta=1.0)
    if axis != -1:
        e.transpose(result, order, target)


SOFTMAX = Op(
    "softmax",
    _compute,
    _emit,
    prepare=_prepare,
    doc="softmax along one axis; its output has 256 steps from 0 to 1",
    layers=(layers.Softmax,),
    kinds=("softmax",),
    functions=(keras.activations.softmax, tf.nn.softmax),
    attributes=_attributes,
    needs=("axis",),
    accepts=_accepts,
    output=FixedRange(0.0, 255 / 256),
)


MANY = 511
"""If softmax is over more values than this, its mean result is at most half an 8-bit step."""
SOME, FEW_IN_ALL = 63, 2**13
"""If softmax is over more values than `SOME`, its mean result is at most four 8-bit steps. For a
tensor of up to `FEW_IN_ALL` values, 16 bits cost at most 0.1 ms more than 8 bits."""

SHARES = QuantParams(np.float32(2.0**-15), 0, 16)
"""Quantization parameters of the output of the 16-bit SOFTMAX."""


def _compute_shares(
    m: Machine, inputs: list[Quantized], output: QuantParams, attributes: Attributes, shape: Shape
) -> Quantized:
    """Run a 16-bit softmax. An 8-bit input is first converted to 16 bits."""
    (x,) = inputs
    if x[1].bits < 16:
        is_prepared = output.scale is None
        finer = WIDE if is_prepared else wide_params(x[1].as_tensors().scale * 2.0**-7)
        x = m.run(REQUANTIZE, [x], finer)
    return m.run(SOFTMAX, [x], SHARES, attributes={"axis": attributes["axis"]})


SOFTMAX_OF_MANY = Op(
    "softmax_of_many",
    **compose(_compute_shares),
    doc="softmax over many values, computed in 16 bits, with an observed range",
    layers=(SoftmaxOfMany,),
    attributes=_attributes,
    needs=("axis",),
    accepts=lambda call, attributes: NO_WIDE or _accepts(call, attributes),
)


LARGEST_EPSILON = 1e-5
"""The largest epsilon of a layer that L2_NORMALIZATION can compute. The operator has no epsilon."""


def _unit_norm(a: Arguments) -> tf.Tensor:
    """Divide vectors along the last axis by their Euclidean length. The result's scale is 1/128."""
    x = tf.cast(a.q[0], tf.int64)
    multiplier, exponent = inverse_square_root(tf.reduce_sum(x * x, -1, keepdims=True))
    return tf.cast(multiply(x, (multiplier, exponent + 7)), a.q[0].dtype)


def _norm_attributes(call: Call) -> Attributes:
    axis, epsilon = getattr(call.layer, "axis", None), None
    if is_operation(call.layer):
        axis, epsilon = get_operands(call, "axis", "epsilon")
    rank = len(call.output.shape)
    axes = tuple(int(item) % rank - rank for item in tf.nest.flatten([axis]) if item is not None)
    return {"axes": axes, "epsilon": read_scalar(epsilon) or 0.0}


def _accepts_norm(call: Call, attributes: Attributes) -> str | None:
    rank = len(call.output.shape)
    if attributes["axes"] != (-1,) or rank < 2:
        return "not along the last axis"
    if attributes["epsilon"] > LARGEST_EPSILON:
        return f"epsilon above {LARGEST_EPSILON:g}"
    return accept_float(call)


UNIT_NORM = Op(
    "unit_norm",
    _unit_norm,
    lambda e: e.add("L2_NORMALIZATION"),
    doc="L2 normalization along the last axis",
    layers=(layers.UnitNormalization,),
    kinds=("l2_normalize",),
    attributes=_norm_attributes,
    defaults={"axes": (-1,), "epsilon": 0.0},
    accepts=_accepts_norm,
    max_axes=4,
    bits=(8,),
    output=FixedRange(-1.0, 127 / 128),
)
