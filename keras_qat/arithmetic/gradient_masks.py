"""Gradients of quantizers on a CPU. Elements within the range pass the gradient.

A single operation reads each element once. XLA does not support that operation. On a GPU it would
read the range from host memory, which makes the GPU wait. In both cases quantizers keep a mask of
elements instead (`plain_operations`).
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
    """Returns a gradient if `x` is at most a millionth beyond a nudged range, else zero.

    Args:
        gradient, x: the upstream gradient, and the tensor.
        minimum, maximum: the range.
        bits, narrow_range: as in `QuantSpec`.
        on: True, or a scalar tensor. If it is false, all elements pass.
    """
    beyond = [math.inf, -math.inf]
    # The rounding operation clips infinity to the ends, with identical bits.
    ends = BEYOND * tf.quantization.fake_quant_with_min_max_vars(
        beyond, minimum, maximum, bits, narrow_range
    )
    return _zero_outside(
        gradient, x, *tf.unstack(ends if on is True else tf.where(on, ends, beyond))
    )


def zero_outside_relu(
    gradient: tf.Tensor, x: tf.Tensor, maximum: Scalar, ceiling: float, on: bool | tf.Tensor = True
) -> tf.Tensor:
    """Returns a gradient if `x` is above zero, up to `maximum`, and below the `ceiling`, else zero.

    Args:
        gradient, x: the upstream gradient, and the tensor.
        maximum: upper end of the range of a ReLU. A millionth beyond it passes, too.
        ceiling: upper end of the ReLU, which has no gradient there.
        on: True, or a scalar tensor. If it is false, all elements below the ceiling pass.
    """
    last = float(np.nextafter(np.float32(ceiling), np.float32(0)))
    least = min if isinstance(maximum, float) else tf.minimum
    end = least(maximum * BEYOND, last)
    return _zero_outside(gradient, x, end if on is True else tf.where(on, end, last))


def _zero_outside(upstream: tf.Tensor, x: tf.Tensor, high: Scalar, low: Scalar = TINY) -> tf.Tensor:
    """Return `upstream` if `x` is from `low` to `high`, else zero. It computes in float32.

    The gradient of another rounding operation does so in one pass. A mask would need four: two
    comparisons, their conjunction and a selection.
    """
    if x.dtype != tf.float32:
        with tf.control_dependencies([upstream]):  # The cast must not be kept by the forward pass.
            x = tf.identity(x)
    gradient, x, high, low = (tf.cast(tensor, tf.float32) for tensor in (upstream, x, high, low))
    gradient, *_ = tf.raw_ops.QuantizeAndDequantizeV4Grad(
        gradients=gradient, input=x, input_min=low, input_max=high
    )
    return tf.cast(gradient, upstream.dtype)
