"""Computes as OpenVINO does on x86: real numbers in float32, and one way to quantize them.

Its FakeQuantize multiplies by levels per unit of the range and adds the level of zero, fused, in
float32, then rounds halves to even. These two numbers follow from the range's ends, not from its
scale, so that some results near halves differ from a division by the scale.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.as_written import product, quotient
from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.ops.op import Arguments

UNSIGNED = 128
"""Difference of zero points in uint8 and in int8."""

LEVELS = 255.0
"""Steps between the ends of a range of 8 bits."""


@dataclasses.dataclass(frozen=True)
class Levels:
    """The numbers of FakeQuantize.

    Args:
        factor: levels per unit.
        shift: the level of zero, as float32 computes it.
        zero_point: the output's in uint8.
    """

    factor: Any
    shift: Any
    zero_point: Any


def _zero_point(params: QuantParams) -> Any:
    """Returns the zero point of uint8, in float64."""
    return tf.cast(params.zero_point, tf.float64) + UNSIGNED


def prepare_levels(output: QuantParams, unit: Any = None) -> Levels:
    """Prepares `quantized` for real numbers, or for multiples of a `unit`."""
    zero_point = _zero_point(output)
    low, high = (single((end - zero_point) * output.scale) for end in (0.0, LEVELS))
    if unit is not None:
        low, high = single(quotient(low, unit)), single(quotient(high, unit))
    width = single(high - low)
    factor = single(quotient(tf.constant(LEVELS, tf.float64), width))
    return Levels(factor, single(quotient(single(-low * LEVELS), width)), zero_point)


def quantized(x: Any, levels: Levels, dtype: tf.DType = tf.float32) -> Any:
    """Quantizes real numbers, without a clip, less the zero point."""
    level = single(product(tf.cast(x, tf.float64), levels.factor) + levels.shift)
    return tf.cast(tf.round(level) - levels.zero_point, dtype)


@dataclasses.dataclass(frozen=True)
class SumsNumbers:
    """The numbers of sums of products with weights.

    Args:
        factor: the unit of each output channel's sums, in reals or in levels.
        bias: of each output channel, in reals, or in levels with the level of zero.
        levels: from reals, or from levels: then they are only rounded.
    """

    factor: Any
    bias: Any
    levels: Levels


def prepare_sums(scales: Any, bias: Any, output: QuantParams, is_matrix: bool) -> SumsNumbers:
    """Prepares `rescaled`.

    Args:
        scales: input scale times weight scale, for each output channel, of float32.
        bias: for each output channel in whole numbers, or None.
        output: the output's range.
        is_matrix: whether it is a product with a matrix. There, and where all biases are zero, the
            output's levels are part of the factor.
    """
    levels = prepare_levels(output)
    bias = tf.zeros_like(scales) if bias is None else tf.cast(bias, tf.float64)
    real = single(bias * scales)
    one, none = tf.constant(1.0, tf.float64), tf.constant(0.0, tf.float64)
    only_rounded = Levels(one, none, levels.zero_point)
    if is_matrix:
        bias = single(single(product(real, levels.factor)) + levels.shift)
        return SumsNumbers(single(product(scales, levels.factor)), bias, only_rounded)
    in_steps, no_bias = prepare_levels(output, scales), tf.reduce_all(bias == 0.0)
    return SumsNumbers(
        tf.where(no_bias, in_steps.factor, scales),
        tf.where(no_bias, in_steps.shift, real),
        Levels(
            tf.where(no_bias, one, levels.factor),
            tf.where(no_bias, none, levels.shift),
            levels.zero_point,
        ),
    )


def rescaled(sums: Any, numbers: SumsNumbers) -> Any:
    """Multiplies whole sums, adds the bias, and quantizes the result."""
    x = single(single(product(tf.cast(sums, tf.float64), numbers.factor)) + numbers.bias)
    return quantized(x, numbers.levels, sums.dtype)


def prepare_sum(a: Arguments) -> tuple[Any, ...]:
    """Prepares `sum_of_two`: the ratio of scales, what is subtracted, a zero point, levels."""
    (first, second), (zero_1, zero_2) = a.params, map(_zero_point, a.params)
    ratio = single(quotient(first.scale, second.scale))
    zeros = single(zero_1 + single(quotient(single(zero_2 * second.scale), first.scale)))
    return ratio, zero_1, zeros, zero_2, prepare_levels(a.output, second.scale)


def sum_of_two(q: list[Any], numbers: tuple[Any, ...]) -> Any:
    """Adds two tensors in steps of the second, whose zero point the first one subtracts."""
    ratio, zero_1, zeros, zero_2, levels = numbers
    x, y = (tf.cast(part, tf.float64) for part in q)
    steps = single(single(product(single(x + zero_1 - zeros), ratio)) + (y + zero_2))
    return quantized(steps, levels, q[0].dtype)


def prepare_reals(a: Arguments) -> tuple[Any, Levels]:
    """Prepares `product_of_two` and `mean`: the inputs' scales, and the output's levels."""
    return [x.scale for x in a.params], prepare_levels(a.output)


def product_of_two(q: list[Any], numbers: tuple[Any, Levels]) -> Any:
    """Multiplies two tensors."""
    scales, levels = numbers
    reals = [
        single(product(tf.cast(x, tf.float64), scale)) for x, scale in zip(q, scales, strict=True)
    ]
    return quantized(single(product(*reals)), levels, q[0].dtype)


def mean(sums: Any, count: Any, numbers: tuple[Any, Levels]) -> Any:
    """Divides sums of whole numbers by their count, and multiplies by the scale."""
    (scale,), levels = numbers
    return quantized(single(product(single(quotient(sums, count)), scale)), levels)
