"""Computes as onnxruntime's kernels (MLAS) do, where they differ from all other kernels.

They compute in float32, add the output's zero point, that of uint8, and then round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.plain_operations import product, quotient
from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.ops.op import Arguments

Rounding = Callable[[Any], Any]
"""`KernelFamily.halves`."""

UNSIGNED = 128
"""Difference of zero points in uint8 and in int8."""


def _zero_point(params: QuantParams) -> Any:
    """Returns the zero point of uint8, in float64."""
    return tf.cast(params.zero_point, tf.float64) + UNSIGNED


def _rounded(x: Any, zero_point: Any, dtype: tf.DType, halves: Rounding) -> Any:
    """Rounds values that include the zero point, and subtracts it."""
    return tf.cast(halves(x) - zero_point, dtype)


def prepare_sum(a: Arguments) -> tuple[Any, ...]:
    """Prepares `add`: both ratios of scales, both zero points, the offset, the output's."""
    ratios = [single(quotient(x.scale, a.output.scale)) for x in a.params]
    zero_points = [_zero_point(x) for x in a.params]
    (first, second), (zero_1, zero_2) = ratios, zero_points
    zeros = single(product(first, zero_1) + single(product(second, zero_2)))
    output = _zero_point(a.output)
    return *ratios, *zero_points, single(output - zeros), output


def add(q: list[Any], prepared: tuple[Any, ...], halves: Rounding) -> Any:
    """Adds two tensors by two fused multiplications and additions in float32."""
    first, second, zero_1, zero_2, offset, output = prepared
    x, y = (tf.cast(part, tf.float64) for part in q)
    partly = single(product(y + zero_2, second) + offset)
    return _rounded(single(product(x + zero_1, first) + partly), output, q[0].dtype, halves)


def prepare_product(a: Arguments) -> tuple[Any, Any]:
    """Prepares `multiply`: the ratio of the scales, and the output's zero point."""
    first, second = (x.scale for x in a.params)
    return single(quotient(single(first * second), a.output.scale)), _zero_point(a.output)


def multiply(q: list[Any], prepared: tuple[Any, Any], halves: Rounding) -> Any:
    """Multiplies two tensors."""
    ratio, output = prepared
    exact = tf.cast(q[0], tf.float64) * tf.cast(q[1], tf.float64)
    return _rounded(single(single(product(exact, ratio)) + output), output, q[0].dtype, halves)


@dataclasses.dataclass(frozen=True)
class SoftmaxNumbers:
    """The numbers of softmax.

    Args:
        table: exponentials of 0 to 255 steps below the largest value.
        levels: quantized values for 1.
        zero_point: the output's.
    """

    table: Any
    levels: Any
    zero_point: Any


def prepare_softmax(a: Arguments, count: int) -> SoftmaxNumbers:
    """Prepares `softmax` of `count` values at a time."""
    (x,) = a.params
    # The largest number of float32 is shared out among all exponentials.
    most = max(0.0, math.log(float(np.finfo(np.float32).max) / count) - 5.0)
    steps = quotient(tf.constant(most, tf.float64), x.scale) - tf.range(256, dtype=tf.float64)
    table = tf.cast(tf.exp(product(steps, x.scale)), tf.float32)
    levels = tf.floor(single(quotient(1.0, a.output.scale)))
    return SoftmaxNumbers(table, tf.cast(levels, tf.float32), _zero_point(a.output))


def softmax(q: Any, prepared: SoftmaxNumbers, axis: int) -> Any:
    """Divides exponentials from a table by their sum, which is added up one after another."""
    below = tf.reduce_max(q, axis, keepdims=True) - q
    exponentials = tf.gather(prepared.table, tf.cast(below, tf.int32))
    total = sum_in_order(exponentials, axis)
    return tf.round(quotient(product(exponentials, prepared.levels), total))


def sum_in_order(x: Any, axis: int) -> Any:
    """Adds up numbers along an axis one after another, as their sum in float32 depends on it."""
    sums = tf.cumsum(x, axis)
    return tf.gather(sums, tf.shape(sums)[axis] + tf.constant([-1]), axis=axis)
