"""Quotients of two tensors: a table of 1 / y in 16 bits, and a product with it.

TFLite has no int8 kernel that divides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic.plain_operations import quotient
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.helper_layers.finite_functions import Quotient
from keras_qat.ops.composed import (
    MOST,
    NO_WIDE,
    WIDE,
    Computing,
    Emitting,
    Machine,
    Preparing,
    Quantized,
    Shape,
    compute_wide_scale,
    wide_params,
)
from keras_qat.ops.elementwise import MULTIPLY, accepts_up_to
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Op
from keras_qat.ops.requantize import REQUANTIZE


class _Parts(NamedTuple):
    """The quantization parameters of the 16-bit parts, and the table.

    Args:
        numerator: parameters of x in 16 bits: 1/128 of its 8-bit scale.
        inverse: of 1 / y, whose largest value is that of the smallest y but 0.
        quotient: of x / y, as far as the output's range reaches.
        table: 1 / y for all quantized values of y, the lowest first; the largest value at 0.
    """

    numerator: QuantParams
    inverse: QuantParams
    quotient: QuantParams
    table: Any = None


def _parts(x: QuantParams, y: QuantParams, output: QuantParams) -> _Parts:
    x, y, output = (params.as_tensors() for params in (x, y, output))
    numerator = wide_params(x.scale * 2.0**-7)
    inverse = wide_params(quotient(quotient(1.0, y.scale), MOST))
    q = tf.range(2.0**8, dtype=tf.float64) + y.lowest - y.zero_point
    return _Parts(
        numerator=numerator,
        inverse=inverse,
        # Products of 16 bits overflow where they are multiplied by more than a half.
        quotient=wide_params(
            tf.maximum(compute_wide_scale(output), 2.0 * numerator.scale * inverse.scale)
        ),
        table=round_half_away(quotient(MOST, tf.where(q == 0, tf.ones_like(q), q))),
    )


def _divided(m: Machine, x: Quantized, y: Quantized, shape: Shape, parts: _Parts) -> Quantized:
    """Runs the rows that divide, up to the quotient in 16 bits."""
    numerator = m.run(REQUANTIZE, [x], parts.numerator)
    inverse = m.looked_up(parts.table, parts.inverse, y)
    return m.run(MULTIPLY, [numerator, inverse], parts.quotient, shape=shape)


def _prepare(a: Arguments) -> list[Any]:
    prepared: list[Any] = []
    x, y = zip(a.q, a.params, strict=True)
    shape = tuple(tf.broadcast_static_shape(*(q.shape for q in a.q)))
    m, parts = Preparing(a, prepared), _parts(x[1], y[1], a.output)
    m.run(REQUANTIZE, [_divided(m, x, y, shape, parts)], a.output)
    return prepared


def _compute(a: Arguments) -> Any:
    x, y = zip(a.q, a.params, strict=True)
    m, parts = Computing(a, a.prepared), _Parts(WIDE, WIDE, WIDE)
    return m.run(REQUANTIZE, [_divided(m, x, y, (), parts)], a.output)[0]


def _emit(e: Emission) -> None:
    x, y = zip(e.inputs, e.all_params, strict=True)
    parts = _parts(x[1], y[1], e.params)
    result, _ = _divided(Emitting(e), x, y, e.shape(e.outputs[0]), parts)
    e.add("QUANTIZE", [result])


DIVIDE = Op(
    "divide",
    _compute,
    _emit,
    prepare=_prepare,
    doc="quotients of two tensors, in parts of 16 bits; the largest quotient where one is by 0",
    layers=(Quotient,),
    kinds=("divide",),
    accepts=lambda call, attributes: NO_WIDE or accepts_up_to(5)(call, attributes),
    max_axes=5,
    bits=(8,),
    quantizes_constants=True,
)
