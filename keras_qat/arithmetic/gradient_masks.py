"""Gradients of quantizers on a CPU, which are zero for elements outside the range.

They use one TensorFlow operation that reads each element once. XLA does not support this operation,
and a GPU would wait while it reads the range from host memory. In XLA and on GPUs, quantizers
therefore store a mask (`plain_operations`).
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
    """Returns the gradient for elements of `x` in the nudged range, and zero for other elements.

    Elements up to a millionth beyond the range are included.

    Args:
        gradient, x: the upstream gradient, and the tensor.
        minimum, maximum: the range before nudging.
        bits, narrow_range: as in `QuantSpec`.
        on: True, or a scalar tensor. If it is false, the gradient is returned for all elements.
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
    """Returns the upstream gradient where `x` is above 0, up to `maximum` and below `ceiling`.

    It is zero for all other elements.

    Args:
        gradient, x: the upstream gradient, and the tensor.
        maximum: upper end of the quantized range. Elements up to a millionth above it are included.
        ceiling: maximum of the ReLU. From there on, the gradient is zero.
        on: True, or a scalar tensor. If it is false, `maximum` is ignored.
    """
    last = float(np.nextafter(np.float32(ceiling), np.float32(0)))
    least = min if isinstance(maximum, float) else tf.minimum
    end = least(maximum * BEYOND, last)
    return _zero_outside(gradient, x, end if on is True else tf.where(on, end, last))


def _zero_outside(upstream: tf.Tensor, x: tf.Tensor, high: Scalar, low: Scalar = TINY) -> tf.Tensor:
    """Return `upstream` if `x` is from `low` to `high`, or zero.

    It uses the gradient of a TensorFlow operation, which reads `x` once. A mask would need four
    operations.
    """
    if x.dtype != tf.float32:
        with tf.control_dependencies([upstream]):  # Not in the forward pass.
            x = tf.identity(x)
    gradient, x, high, low = (tf.cast(tensor, tf.float32) for tensor in (upstream, x, high, low))
    gradient, *_ = tf.raw_ops.QuantizeAndDequantizeV4Grad(
        gradients=gradient, input=x, input_min=low, input_max=high
    )
    return tf.cast(gradient, upstream.dtype)
