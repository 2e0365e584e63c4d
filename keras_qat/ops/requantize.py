"""Between real numbers and quantized values, and between quantization parameters: QUANTIZE."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.control_flow import cond
from keras_qat.arithmetic.fixed_point import fixed_point, multiply
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.partial_evaluation import of_numbers
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.ops.op import Arguments, Op

__all__ = ["QUANTIZE", "REQUANTIZE", "requantized"]


def _quantize(a: Arguments) -> Any:
    """Real numbers: XNNPACK multiplies by the inverse of the scale and rounds half to even.

    TFLite's own kernel, which int16 always has, divides and rounds half away from zero.
    """
    (x,), scale = a.q, a.output.scale
    x = tf.cast(x, tf.float64)
    if a.family.quantize == "times_inverse" and a.output.bits != 16:
        return tf.cast(tf.round(single(x * single(1.0 / scale))), tf.float32)
    scaled = round_half_away(single(x / scale))
    return scaled if a.output.bits == 16 else tf.cast(scaled, tf.float32)


def requantized(family: KernelFamily, q: Any, params: QuantParams, output: QuantParams) -> Any:
    """The same real values with other parameters; `q` and the result less their zero points.

    XNNPACK multiplies by a whole number of 256ths and rounds half up, where the ratio of the scales
    is from 2^-8 to 2^7; TFLite's kernel by a 31-bit number, twice rounded.
    """
    before, after = (each.as_tensors().scale for each in (params, output))

    def exact() -> Any:
        return tf.cast(multiply(tf.cast(q, tf.int64), _ratio(before, after)), q.dtype)

    if family.requantize != "256ths" or 16 in (params.bits, output.bits):
        return exact()
    in_256ths, taken = _in_256ths(before, after, q.dtype)
    return cond(taken, lambda: tf.floor((q * in_256ths + 128.0) * 2.0**-8), exact)


@of_numbers
def _ratio(before: Any, after: Any) -> tuple[Any, Any]:
    """The ratio of two scales, in fixed point."""
    return fixed_point(before / after)


@of_numbers
def _in_256ths(before: Any, after: Any, dtype: tf.DType) -> tuple[Any, Any]:
    """The same in 256ths, and whether XNNPACK multiplies by that."""
    ratio = single(before / after)
    return tf.cast(tf.round(256.0 * ratio), dtype), (ratio >= 2.0**-8) & (ratio <= 2.0**7)


def _requantize(a: Arguments) -> Any:
    return requantized(a.family, a.q[0], a.params[0], a.output)


QUANTIZE = Op(
    "quantize", _quantize, lambda e: e.add("QUANTIZE"), doc="real numbers to quantized values"
)
REQUANTIZE = dataclasses.replace(
    QUANTIZE, name="requantize", compute=_requantize, doc="other quantization parameters"
)
