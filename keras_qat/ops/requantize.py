"""Between real numbers and quantized values, and between quantization parameters: QUANTIZE."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic.control_flow import cond
from keras_qat.arithmetic.fixed_point import FINER_STEPS, LEAST_RATIO, multiply, to_fixed_point
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.ops.op import Arguments, Op, get_held_dtype


def _prepare_quantize(a: Arguments) -> Any:
    """Prepares the inverse of the scale where kernels multiply by it, else the scale."""
    return single(1.0 / a.output.scale) if _takes_inverse(a) else a.output.scale


def _takes_inverse(a: Arguments) -> bool:
    """Whether the kernel multiplies by the inverse; TFLite's own, as always in int16, divides."""
    return a.family.quantize == "times_inverse" and a.output.bits != 16


def _quantize(a: Arguments) -> Any:
    """Quantizes real numbers: half to even, or half away from zero in TFLite's own kernel."""
    x = tf.cast(a.q[0], tf.float64)
    if _takes_inverse(a):
        return tf.cast(tf.round(single(x * a.prepared)), tf.float32)
    in_float32 = a.family.quantize == "divided_by_float32"
    rounded = a.family.halves if in_float32 else round_half_away
    return tf.cast(rounded(single(x / a.prepared)), get_held_dtype(a.output))


class Multiplier(NamedTuple):
    """A ratio of scales by which integers are multiplied, in one of two ways.

    Args:
        fixed: the ratio in fixed point, None where it is never read.
        other: what the family's own kernel multiplies by, None where no kernel does.
        is_other: whether the family's kernel does.
        steps: int16 steps for each int8 step, where values are held in int16 in between.
    """

    fixed: Any
    other: Any = None
    is_other: Any = False
    steps: Any = None

    def times(
        self, in_int64: Callable[[], Any], dtype: tf.DType, in_other: Callable[[Any], Any]
    ) -> Any:
        """Multiplies integers by the ratio, in the way of the kernel family.

        Args:
            in_int64: computes what is multiplied in fixed point, in int64.
            dtype: the type of that result.
            in_other: computes the result in the family's own way, given `other`.
        """

        def in_fixed_point() -> Any:
            x = in_int64() if self.steps is None else in_int64() * self.steps
            return tf.cast(multiply(x, self.fixed), dtype)

        return cond(self.is_other, lambda: in_other(self.other), in_fixed_point)


def prepare_requantization(
    family: KernelFamily, params: QuantParams, output: QuantParams
) -> Multiplier:
    """Prepares `requantize`.

    XNNPACK multiplies by a whole number of 256ths where the ratio of the scales is from 2^-8 to
    2^7; TFLite's kernel by a 31-bit number. `Builder.quantize` writes what is prepared here.
    """
    before, after = (end.as_tensors().scale for end in (params, output))
    if max(params.bits, output.bits) > 8:
        return Multiplier(to_fixed_point(before / after))
    if family.requantize == "float32":
        return Multiplier(None, (before, after, family.halves), True)
    coarse = single(before / after)
    one, finer = (tf.constant(steps, tf.float64) for steps in (1.0, FINER_STEPS))
    steps = tf.where(coarse < LEAST_RATIO, finer, one)
    precise = Multiplier(to_fixed_point(before / steps / after), steps=tf.cast(steps, tf.int64))
    if family.requantize == "fixed_point":
        return precise
    factor = tf.cast(tf.round(256.0 * coarse), tf.float32)
    is_coarse = (coarse >= LEAST_RATIO) & (coarse <= 2.0**7)
    return precise._replace(other=factor, is_other=is_coarse)


def requantize(q: Any, prepared: Multiplier) -> Any:
    """Expresses the same real values with other parameters.

    Zero points are subtracted from `q` and from the result. 256ths are rounded once, half up;
    31-bit numbers twice; real numbers once, as the family rounds halves.
    """

    def in_other(factor: Any) -> Any:
        if isinstance(factor, tuple):
            before, after, halves = factor
            real = single(tf.cast(q, tf.float64) * before)
            return tf.cast(halves(single(real / after)), q.dtype)
        return tf.floor((q * tf.cast(factor, q.dtype) + 128.0) * 2.0**-8)

    return prepared.times(lambda: tf.cast(q, tf.int64), q.dtype, in_other)


QUANTIZE = Op(
    "quantize",
    _quantize,
    lambda e: e.builder.quantize(e.inputs[0], e.outputs[0]),
    doc="real numbers to quantized values",
    prepare=_prepare_quantize,
    only_rounds=True,
)
REQUANTIZE = dataclasses.replace(
    QUANTIZE,
    name="requantize",
    prepare=lambda a: prepare_requantization(a.family, a.params[0], a.output),
    compute=lambda a: requantize(a.q[0], a.prepared),
    doc="other quantization parameters",
)
