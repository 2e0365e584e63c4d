"""Division x / y of two tensors. A 16-bit lookup table returns 1 / y, which is multiplied by x.

TFLite has no int8 kernel for division.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic.plain_operations import quotient
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.helper_layers.elementwise_functions import Quotient
from keras_qat.ops.composed import (
    MOST,
    NO_WIDE,
    WIDE,
    Machine,
    Quantized,
    compose,
    compute_wide_scale,
    wide_params,
)
from keras_qat.ops.elementwise import MULTIPLY, accepts_two
from keras_qat.ops.emission import Shape
from keras_qat.ops.op import Attributes, Op
from keras_qat.ops.requantize import REQUANTIZE


class _Steps(NamedTuple):
    """The quantization parameters of the 16-bit intermediate results, and the table.

    Args:
        numerator: parameters of x in 16 bits. The scale is 1/128 of the 8-bit scale.
        inverse: parameters of 1 / y. The largest value is the inverse of the smallest positive y.
        quotient: parameters of x / y. Their range contains the output's range.
        table: 1 / y for each quantized value of y, from the lowest to the highest. For y = 0, the
            entry is the largest value.
    """

    numerator: QuantParams = WIDE
    inverse: QuantParams = WIDE
    quotient: QuantParams = WIDE
    table: Any = None


def _find_steps(x: QuantParams, y: QuantParams, output: QuantParams) -> _Steps:
    x, y, output = (params.as_tensors() for params in (x, y, output))
    numerator = wide_params(x.scale * 2.0**-7)
    inverse = wide_params(quotient(quotient(1.0, y.scale), MOST))
    # 16-bit products overflow if they are rescaled by more than 1/2.
    scale = tf.maximum(compute_wide_scale(output), 2.0 * numerator.scale * inverse.scale)
    q = tf.range(2.0**8, dtype=tf.float64) + y.lowest - y.zero_point
    table = round_half_away(quotient(MOST, tf.where(q == 0, tf.ones_like(q), q)))
    return _Steps(numerator, inverse, wide_params(scale), table)


def _divide(
    m: Machine, inputs: list[Quantized], output: QuantParams, attributes: Attributes, shape: Shape
) -> Quantized:
    """Run the operators of a division, and return the quotient in 16 bits."""
    x, y = inputs
    steps = _Steps() if output.scale is None else _find_steps(x[1], y[1], output)
    numerator = m.run(REQUANTIZE, [x], steps.numerator)
    inverse = m.look_up(steps.table, steps.inverse, y)
    return m.run(MULTIPLY, [numerator, inverse], steps.quotient, shape=shape)


DIVIDE = Op(
    "divide",
    **compose(_divide),
    doc="quotients of two tensors, computed in 16 bits; division by 0 returns the largest quotient",
    layers=(Quotient,),
    kinds=("divide",),
    accepts=lambda call, attributes: NO_WIDE or accepts_two(5, call, attributes),
    max_axes=5,
    bits=(8,),
    quantizes_constants=True,
)
