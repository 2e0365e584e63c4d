"""Between real numbers and quantized values, and between quantization parameters: QUANTIZE."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.control_flow import cond
from keras_qat.arithmetic.fixed_point import fixed_point, multiply
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.ops.op import Arguments, Op

__all__ = ["QUANTIZE", "REQUANTIZE", "Requantization", "requantization", "requantized"]


def _prepare_quantize(a: Arguments) -> Any:
    """XNNPACK multiplies by the inverse of the scale; TFLite's kernel divides by the scale."""
    return single(1.0 / a.output.scale) if _takes_inverse(a) else a.output.scale


def _takes_inverse(a: Arguments) -> bool:
    """TFLite's own kernel, which int16 always has, divides."""
    return a.family.quantize == "times_inverse" and a.output.bits != 16


def _quantize(a: Arguments) -> Any:
    """Quantizes real numbers: half to even, or half away from zero in TFLite's own kernel."""
    x = tf.cast(a.q[0], tf.float64)
    if _takes_inverse(a):
        return tf.cast(tf.round(single(x * a.numbers)), tf.float32)
    scaled = round_half_away(single(x / a.numbers))
    return scaled if a.output.bits == 16 else tf.cast(scaled, tf.float32)


@dataclasses.dataclass(frozen=True)
class Requantization:
    """Numbers that bring quantized values to other parameters.

    Args:
        ratio: of the scales, in fixed point.
        in_256ths: the same in 256ths; None where no kernel multiplies by that.
        is_taken: whether the family's kernel does.
    """

    ratio: tuple[Any, Any]
    in_256ths: Any = None
    is_taken: Any = None


def requantization(
    family: KernelFamily, params: QuantParams, output: QuantParams
) -> Requantization:
    """Prepares `requantized`.

    XNNPACK multiplies by a whole number of 256ths where the ratio of the scales is from 2^-8 to
    2^7; TFLite's kernel by a 31-bit number.
    """
    before, after = (each.as_tensors().scale for each in (params, output))
    ratio = fixed_point(before / after)
    if family.requantize != "256ths" or 16 in (params.bits, output.bits):
        return Requantization(ratio)
    coarse = single(before / after)
    is_taken = (coarse >= 2.0**-8) & (coarse <= 2.0**7)
    return Requantization(ratio, tf.cast(tf.round(256.0 * coarse), tf.float32), is_taken)


def requantized(q: Any, numbers: Requantization) -> Any:
    """Expresses the same real values with other parameters.

    Zero points are subtracted from `q` and from the result. 256ths are rounded once, half up;
    31-bit numbers twice.
    """

    def exact() -> Any:
        return tf.cast(multiply(tf.cast(q, tf.int64), numbers.ratio), q.dtype)

    if numbers.is_taken is None:
        return exact()
    factor = tf.cast(numbers.in_256ths, q.dtype)
    return cond(numbers.is_taken, lambda: tf.floor((q * factor + 128.0) * 2.0**-8), exact)


QUANTIZE = Op(
    "quantize",
    _quantize,
    lambda e: e.add("QUANTIZE"),
    doc="real numbers to quantized values",
    prepare=_prepare_quantize,
    only_rounds=True,
)
REQUANTIZE = dataclasses.replace(
    QUANTIZE,
    name="requantize",
    prepare=lambda a: requantization(a.family, a.params[0], a.output),
    compute=lambda a: requantized(a.q[0], a.numbers),
    doc="other quantization parameters",
)
