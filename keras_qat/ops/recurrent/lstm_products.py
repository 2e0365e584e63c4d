"""The products of an LSTM's weights with its inputs and its hidden state."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fixed_point
from keras_qat.arithmetic.control_flow import Predicate, cond
from keras_qat.arithmetic.fixed_point import to_fixed_point
from keras_qat.arithmetic.quant_params import QuantParams, ratio
from keras_qat.ops.op import Arguments
from keras_qat.ops.weights import Weights, compute_reach

GATE = QuantParams(np.float32(2.0**-12), 0, 16)
"""Quantization parameters of gates, before sigmoid or tanh."""


@dataclasses.dataclass(frozen=True)
class Products:
    """The weights for the inputs or for the hidden state, with the multipliers that rescale sums.

    Args:
        kernel, bias: the quantized weights.
        factor: fixed-point multipliers that convert sums of products to the scale of `GATE`.
        in_float: the same multipliers in the format of `fixed_point.multiply_floats`.
        is_small: whether results with `in_float` are exact, because all sums are small.
    """

    kernel: Any
    bias: Any
    factor: fixed_point.FixedPoint
    in_float: tuple[Any, Any]
    is_small: Predicate

    @classmethod
    def prepare(cls, a: Arguments, weights: Weights, of_input: Any, largest: int) -> Products:
        """Returns the `Products` for inputs with scale `of_input` and values up to `largest`."""
        scale = tf.reshape(tf.cast(weights.scale, tf.float64), [-1])
        factor = to_fixed_point(ratio(a.family, scale, of_input, by=float(GATE.scale)))
        # Float32 sums of few 8-bit products are exact.
        is_exact = weights.q.shape[0] < 2**24 // (largest * 127) and not a.wide
        bias = None if weights.bias is None else tf.cast(weights.bias, tf.float64)
        # An input's range contains 0, so its values relative to the zero point are at most 255.
        reach = compute_reach(weights.q, (-1,)) * 255.0
        if bias is not None:
            reach += tf.reduce_max(tf.abs(bias))
        is_small = (reach < 2.0**22) & (tf.reduce_max(factor[1]) <= 31 - 22)
        return cls(
            tf.cast(weights.q, tf.float32 if is_exact else tf.float64),
            bias,
            factor,
            fixed_point.to_floats(factor),
            False if a.wide else is_small,
        )

    def multiply(self, a: Arguments, x: Any) -> Any:
        """Returns `x` times the weights plus the bias, in float64 with the scale of `GATE`."""
        sums = tf.cast(tf.matmul(tf.cast(x, self.kernel.dtype), self.kernel), tf.float64)
        if self.bias is not None:
            sums += self.bias

        def multiply_integers() -> Any:
            multiply = fixed_point.multiply_sums if a.wide else fixed_point.multiply
            return tf.cast(multiply(tf.cast(sums, tf.int64), self.factor), tf.float64)

        return cond(
            self.is_small,
            lambda: fixed_point.multiply_floats(sums, self.in_float),
            multiply_integers,
        )
