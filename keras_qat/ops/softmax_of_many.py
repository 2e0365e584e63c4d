"""Softmax of many numbers: that of 16 bits, whose results get a range of their own.

Of 512 numbers that are nearly equal each result is 1/512, and nothing in steps of 1/256. TFLite's
reference kernel of 8 bits ends the process, too, where exponentials add up to 512 or more. Of 64
each is four steps, which leaves 20 dB. But XNNPACK computes 8 bits five times as fast: with fewer
than 512 numbers they are kept, unless the whole tensor is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.helper_layers.finite_functions import SoftmaxOfMany
from keras_qat.ops.composed import (
    NO_WIDE,
    WIDE,
    Computing,
    Emitting,
    Machine,
    Preparing,
    Quantized,
    wide_params,
)
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Op
from keras_qat.ops.requantize import REQUANTIZE
from keras_qat.ops.softmax import SOFTMAX

MANY = 511
"""With more numbers, the mean of the results is half a step of 8 bits or less."""
SOME, FEW_IN_ALL = 63, 2**13
"""With more numbers it is four steps or less; a tensor of so many at most takes a tenth of a
millisecond more in 16 bits."""

SHARES = QuantParams(np.float32(2.0**-15), 0, 16)
"""Of the kernel of 16 bits."""


def _finer(params: QuantParams) -> QuantParams:
    """Returns parameters of 16 bits in which each step of 8 bits is 128 steps."""
    return wide_params(params.as_tensors().scale * 2.0**-7)


def _shares(
    m: Machine, x: Quantized, finer: Callable[[QuantParams], QuantParams], axis: int
) -> Quantized:
    """Runs the rows up to the results in 16 bits."""
    if x[1].bits < 16:
        x = m.run(REQUANTIZE, [x], finer(x[1]))
    return m.run(SOFTMAX, [x], SHARES, attributes={"axis": axis})


def _prepare(a: Arguments) -> list[Any]:
    prepared: list[Any] = []
    m, x = Preparing(a, prepared), (a.q[0], a.params[0])
    m.run(REQUANTIZE, [_shares(m, x, _finer, a.attributes["axis"])], a.output)
    return prepared


def _compute(a: Arguments) -> Any:
    m, x = Computing(a, a.prepared), (a.q[0], a.params[0])
    shares = _shares(m, x, lambda _: WIDE, a.attributes["axis"])
    return m.run(REQUANTIZE, [shares], a.output)[0]


def _emit(e: Emission) -> None:
    x = e.inputs[0], e.all_params[0]
    shares, _ = _shares(Emitting(e), x, _finer, e.attributes["axis"])
    e.add("QUANTIZE", [shares])


SOFTMAX_OF_MANY = Op(
    "softmax_of_many",
    _compute,
    _emit,
    prepare=_prepare,
    doc="softmax of many numbers, in parts of 16 bits, with a range of its own",
    layers=(SoftmaxOfMany,),
    attributes=SOFTMAX.attributes,
    needs=("axis",),
    accepts=lambda call, attributes: NO_WIDE or SOFTMAX.accepts(call, attributes),
)
