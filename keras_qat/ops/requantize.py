"""The operator QUANTIZE. It quantizes float values, or changes the scale and the zero point."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic.control_flow import Predicate, cond
from keras_qat.arithmetic.fixed_point import FINER_STEPS, LEAST_RATIO, multiply, to_fixed_point
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.ops.op import Arguments, Op, get_held_dtype


def _multiplies_by_inverse(a: Arguments) -> bool:
    """Return True if the kernel multiplies by 1 / scale. TFLite's kernel divides by the scale."""
    return a.family.quantize == "times_inverse" and a.output.bits != 16


def _quantize(a: Arguments) -> tf.Tensor:
    """Quantize float values. XNNPACK rounds halves to even, TFLite rounds them away from zero."""
    x = tf.cast(a.q[0], tf.float64)
    if _multiplies_by_inverse(a):
        return tf.cast(tf.round(single(x * a.prepared)), tf.float32)
    return tf.cast(round_half_away(single(x / a.prepared)), get_held_dtype(a.output))


class Multiplier(NamedTuple):
    """A ratio of scales, in the formats of TFLite's kernel and of another kernel such as XNNPACK's.

    Args:
        fixed: the ratio in fixed point, for TFLite's kernel.
        other: the ratio in the format of the other kernel. None if there is no other kernel.
        is_other: whether the other kernel runs.
        steps: a factor for the integers, before they are multiplied by `fixed`. It is not 1 if
            files convert int8 to int16 first, which has finer steps. None means 1.
    """

    fixed: Any
    other: Any = None
    is_other: Predicate = False
    steps: tf.Tensor | None = None

    def multiply(
        self, in_int64: Callable[[], Any], dtype: tf.DType, compute: Callable[[Any], Any]
    ) -> tf.Tensor:
        """Multiplies integers by the ratio. Rounds like the other kernel if `is_other` is True.

        Args:
            in_int64: a function that returns the integers in int64, for TFLite's kernel.
            dtype: the type of the result of TFLite's kernel.
            compute: a function that computes the result of the other kernel from `other`.
        """

        def multiply_in_fixed_point() -> tf.Tensor:
            x = in_int64() if self.steps is None else in_int64() * self.steps
            return tf.cast(multiply(x, self.fixed), dtype)

        return cond(self.is_other, lambda: compute(self.other), multiply_in_fixed_point)


def prepare_requantization(
    family: KernelFamily, params: QuantParams, output: QuantParams
) -> Multiplier:
    """Returns the multiplier that `requantize` needs to convert values from `params` to `output`.

    XNNPACK multiplies by n / 256 for an integer n, if the ratio of scales is from 2^-8 to 2^7.
    Otherwise, TFLite's kernel multiplies by a 31-bit multiplier.
    """
    before, after = (end.as_tensors().scale for end in (params, output))
    if max(params.bits, output.bits) > 8:
        return Multiplier(to_fixed_point(before / after))
    coarse = single(before / after)
    one, finer = (tf.constant(steps, tf.float64) for steps in (1.0, FINER_STEPS))
    steps = tf.where(coarse < LEAST_RATIO, finer, one)
    precise = Multiplier(to_fixed_point(before / steps / after), steps=tf.cast(steps, tf.int64))
    if family.requantize == "fixed_point":
        return precise
    factor = tf.cast(tf.round(256.0 * coarse), tf.float32)
    is_coarse = (coarse >= LEAST_RATIO) & (coarse <= 2.0**7)
    return precise._replace(other=factor, is_other=is_coarse)


def requantize(q: tf.Tensor, multiplier: Multiplier) -> tf.Tensor:
    """Converts quantized values to another scale. Values are relative to the zero points.

    XNNPACK rounds products once, halves up. TFLite's kernel rounds products twice.
    """

    def compute(factor: tf.Tensor) -> tf.Tensor:
        return tf.floor((q * tf.cast(factor, q.dtype) + 128.0) * 2.0**-8)

    return multiplier.multiply(lambda: tf.cast(q, tf.int64), q.dtype, compute)


QUANTIZE = Op(
    "quantize",
    _quantize,
    lambda e: e.builder.quantize(e.inputs[0], e.outputs[0]),
    doc="converts float values to quantized values",
    prepare=lambda a: single(1.0 / a.output.scale) if _multiplies_by_inverse(a) else a.output.scale,
    only_rounds=True,
)
REQUANTIZE = dataclasses.replace(
    QUANTIZE,
    name="requantize",
    prepare=lambda a: prepare_requantization(a.family, a.params[0], a.output),
    compute=lambda a: requantize(a.q[0], a.prepared),
    doc="converts to other quantization parameters",
)
