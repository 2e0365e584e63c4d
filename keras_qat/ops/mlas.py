"""Operators that onnxruntime's kernels (MLAS) compute differently from all other kernels.

MLAS computes in float32, adds the output's uint8 zero point, and then rounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import trace_once
from keras_qat.arithmetic.plain_operations import gather, must_not_fuse, product, quotient
from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.ops.op import Arguments

Rounding = Callable[[tf.Tensor], tf.Tensor]
"""A function that rounds halves, as in `KernelFamily.halves`."""

UNSIGNED = 128
"""Difference between zero points in uint8 and in int8."""


def _zero_point(params: QuantParams) -> tf.Tensor:
    """Return the uint8 zero point, in float64."""
    return tf.cast(params.zero_point, tf.float64) + UNSIGNED


def _round(x: tf.Tensor, zero_point: tf.Tensor, dtype: tf.DType, halves: Rounding) -> tf.Tensor:
    """Round values that include the zero point, and then subtract the zero point."""
    return tf.cast(halves(x) - zero_point, dtype)


def prepare_sum(a: Arguments) -> tuple[tf.Tensor, ...]:
    """Returns the parameters for `add`: ratios of scales, offset, and the output's zero point."""
    ratios = [single(quotient(x.scale, a.output.scale)) for x in a.params]
    zero_points = [_zero_point(x) for x in a.params]
    (first, second), (zero_1, zero_2) = ratios, zero_points
    zeros = single(product(first, zero_1) + single(product(second, zero_2)))
    output = _zero_point(a.output)
    return *ratios, *zero_points, single(output - zeros), output


def add(q: list[tf.Tensor], prepared: tuple[tf.Tensor, ...], halves: Rounding) -> tf.Tensor:
    """Adds two tensors with two fused multiply-adds in float32."""
    first, second, zero_1, zero_2, offset, output = prepared
    x, y = (tf.cast(x, tf.float64) for x in q)
    partly = single(product(y + zero_2, second) + offset)
    return _round(single(product(x + zero_1, first) + partly), output, q[0].dtype, halves)


def prepare_product(a: Arguments) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the parameters for `multiply`: the ratio of scales, and the output's zero point."""
    first, second = (x.scale for x in a.params)
    return single(quotient(single(first * second), a.output.scale)), _zero_point(a.output)


def multiply(
    q: list[tf.Tensor], prepared: tuple[tf.Tensor, tf.Tensor], halves: Rounding
) -> tf.Tensor:
    """Multiplies two tensors in float32, and rounds the result."""
    ratio, output = prepared
    exact = tf.cast(q[0], tf.float64) * tf.cast(q[1], tf.float64)
    return _round(single(single(product(exact, ratio)) + output), output, q[0].dtype, halves)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The prepared parameters of softmax.

    Args:
        table: exponentials, indexed by the difference from the largest quantized value, 0 to 255.
        levels: the output's number of steps from 0 to 1.
        zero_point: the output's zero point.
    """

    table: tf.Tensor
    levels: tf.Tensor
    zero_point: tf.Tensor


def prepare_softmax(a: Arguments, count: int) -> Softmax:
    """Returns the parameters for a `softmax` over `count` values."""
    (x,) = a.params
    # The sum of all exponentials must not exceed the largest float32 value.
    most = max(0.0, math.log(float(np.finfo(np.float32).max) / count) - 5.0)
    steps = quotient(tf.constant(most, tf.float64), x.scale) - tf.range(256, dtype=tf.float64)
    table = tf.cast(tf.exp(product(steps, x.scale)), tf.float32)
    levels = tf.floor(single(quotient(1.0, a.output.scale)))
    return Softmax(table, tf.cast(levels, tf.float32), _zero_point(a.output))


def softmax(q: tf.Tensor, prepared: Softmax, axis: int) -> tf.Tensor:
    """Computes softmax along an axis. Exponentials come from a table, and are summed in order."""
    below = tf.reduce_max(q, axis, keepdims=True) - q
    exponentials = gather(prepared.table, tf.cast(below, tf.int32))
    total = sum_in_order(exponentials, axis)
    return tf.round(quotient(product(exponentials, prepared.levels), total))


MOST_ROWS = 256
"""The maximum number of values per sum in `_add_rows`, which adds an operation for each value."""

FEW_SUMS = 16
"""If an example has fewer sums than this, `tf.cumsum` is faster."""


def sum_in_order(x: tf.Tensor, axis: int) -> tf.Tensor:
    """Sums values along an axis in order, because float32 sums depend on the order."""
    count, size = x.shape[axis], x.shape[1:].num_elements()
    if count and size and FEW_SUMS * count <= size and count <= MOST_ROWS and not must_not_fuse():
        return _add_rows(x, axis)
    sums = tf.cumsum(x, axis)
    return tf.gather(sums, tf.shape(sums)[axis] + tf.constant([-1]), axis=axis)


@trace_once
def _add_rows(x: tf.Tensor, axis: int) -> tf.Tensor:
    """Sums values along an axis in order. It computes many sums at once, unlike `tf.cumsum`.

    It subtracts negated values, because TensorFlow's graph optimizer reorders additions.
    """
    axes = list(range(x.shape.rank))
    axes.insert(0, axes.pop(axis))
    rows = -tf.transpose(x, axes)
    total = -rows[0]
    for index in range(1, rows.shape[0]):
        total -= rows[index]
    return tf.expand_dims(total, axis)
