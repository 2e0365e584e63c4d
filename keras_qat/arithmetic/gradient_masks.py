"""Gradients of fake quantization on a CPU: zero for elements outside the range.

A single TensorFlow operation computes such a gradient. XLA does not support the operation, and it
is slow on GPUs. There, `plain_operations` stores a mask instead.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.plain_operations import BEYOND, TINY, Scalar


def zero_outside_range(
    gradient: tf.Tensor,
    x: tf.Tensor,
    minimum: Scalar,
    maximum: Scalar,
    bits: int,
    narrow_range: bool,
    on: bool | tf.Tensor = True,
) -> tf.Tensor:
    """Sets the gradient to zero for elements of `x` outside the range of fake quantization.

    The range is widened by a millionth, because rounding to float32 may have made it too narrow.

    Args:
        gradient, x: the upstream gradient, and the tensor that was quantized.
        minimum, maximum, bits, narrow_range: as in `fake_quant.fake_quantize`.
        on: True, or a scalar tensor. If the tensor is false, the gradient remains unchanged.
    """
    beyond = [math.inf, -math.inf]
    # Fake quantization of infinity returns the exact ends of the nudged range.
    ends = BEYOND * tf.quantization.fake_quant_with_min_max_vars(
        beyond, minimum, maximum, bits, narrow_range
    )
    return _zero_outside(
        gradient, x, *tf.unstack(ends if on is True else tf.where(on, ends, beyond))
    )


def zero_outside_relu(
    gradient: tf.Tensor, x: tf.Tensor, maximum: Scalar, ceiling: float, on: bool | tf.Tensor = True
) -> tf.Tensor:
    """Sets the gradient to zero unless `0 < x <= maximum` and `x < ceiling`.

    Args:
        gradient, x: the upstream gradient, and the input of the ReLU.
        maximum: upper end of the quantized range. It is widened by a millionth.
        ceiling: 6 for ReLU6, `inf` for a plain ReLU.
        on: True, or a scalar tensor. If the tensor is false, `maximum` is ignored.
    """
    last = float(np.nextafter(np.float32(ceiling), np.float32(0)))
    least = min if isinstance(maximum, float) else tf.minimum
    end = least(maximum * BEYOND, last)
    return _zero_outside(gradient, x, end if on is True else tf.where(on, end, last))


def _zero_outside(upstream: tf.Tensor, x: tf.Tensor, high: Scalar, low: Scalar = TINY) -> tf.Tensor:
    """Return `upstream` where `low <= x <= high`, and zero elsewhere.

    The operation is the gradient of `QuantizeAndDequantizeV4`. A mask would need four operations.
    """
    if x.dtype != tf.float32:
        with tf.control_dependencies([upstream]):  # Cast in the backward pass.
            x = tf.identity(x)
    gradient, x, high, low = (tf.cast(tensor, tf.float32) for tensor in (upstream, x, high, low))
    gradient, *_ = tf.raw_ops.QuantizeAndDequantizeV4Grad(
        gradients=gradient, input=x, input_min=low, input_max=high
    )
    return tf.cast(gradient, upstream.dtype)
