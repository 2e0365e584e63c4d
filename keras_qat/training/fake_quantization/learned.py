"""Fake quantization with learned ranges: gradient descent trains the ends of the ranges.

In learned clipping (PACT, Choi et al. 2018, arXiv:1805.06085), only values outside the range
contribute to the gradient of an end. In learned step size quantization (LSQ, Esser et al. 2020,
arXiv:1902.08153), rounding errors inside the range contribute too.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.arithmetic import fake_quant, plain_operations
from keras_qat.arithmetic.control_flow import cond
from keras_qat.training.fake_quantization.phase import Flag


def _gradient_factor(levels: int, count: tf.Tensor) -> tf.Tensor:
    """Return the factor for the gradient of a range's end.

    LSQ trains the scale, and multiplies its gradient by 1 / sqrt(count * levels). This module
    trains the end of the range, `levels` * scale. Its gradient is `levels` times smaller, and its
    steps must be `levels` times larger. Therefore LSQ's factor is multiplied by `levels`^2.
    """
    return levels**2 / tf.sqrt(tf.cast(count, tf.float32) * levels)


def fake_quantize_learned(
    applies: Flag,
    x: tf.Tensor,
    minimum: tf.Tensor,
    maximum: tf.Tensor,
    bits: int,
    *,
    rounding: bool,
    fixed: Flag,
) -> tf.Tensor:
    """Fake-quantizes `x` if `applies` is true. The ends of the range also get gradients.

    Args:
        applies: true to quantize.
        x, minimum, maximum, bits: as in `fake_quantize`.
        rounding: True if rounding errors contribute to the gradients of the ends, as in LSQ.
        fixed: true to set the gradients of the ends to zero.
    """
    levels = 2**bits - 1

    @tf.custom_gradient
    def quantize(x: tf.Tensor, minimum: tf.Tensor, maximum: tf.Tensor) -> Any:
        dtype, x = x.dtype, tf.cast(x, tf.float32)
        y = cond(
            applies,
            lambda: fake_quant.fake_quantize(x, minimum, maximum, bits),
            lambda: tf.identity(x),
        )

        def gradient(upstream: tf.Tensor) -> Any:
            up = tf.cast(upstream, tf.float32)
            low, high = plain_operations.nudged_range(minimum, maximum, bits)
            above, below = (tf.logical_and(applies, beyond) for beyond in (x > high, x < low))
            inside = up * tf.cast(~(above | below), tf.float32)
            share = tf.zeros([])
            if rounding:
                share = tf.reduce_sum(inside * (y - x))
                share = tf.math.divide_no_nan(share, maximum - minimum)
            features = tf.size(x) // tf.maximum(tf.shape(x)[0], 1)
            gain = _gradient_factor(levels, features)
            gain *= 1.0 - tf.cast(tf.logical_or(fixed, tf.logical_not(applies)), tf.float32)
            ends = (
                tf.reduce_sum(up * tf.cast(below, tf.float32)) - share,
                tf.reduce_sum(up * tf.cast(above, tf.float32)) + share,
            )
            return tf.cast(inside, dtype), ends[0] * gain, ends[1] * gain

        return tf.cast(y, dtype), gradient

    return quantize(x, minimum, maximum)


def fake_quantize_weights_learned(
    quantizing: Flag, weights: tf.Tensor, limits: tf.Tensor, bits: int
) -> tf.Tensor:
    """Rounds weights to 2^bits - 1 levels from -`limits` to `limits`, if `quantizing`.

    Weights beyond the limits are clipped. The gradients are the same as in LSQ.
    """
    levels = 2 ** (bits - 1) - 1
    axes = [axis for axis, size in enumerate(limits.shape) if size == 1]
    count = tf.size(weights) // tf.size(limits)

    @tf.custom_gradient
    def quantize(weights: tf.Tensor, limits: tf.Tensor) -> Any:
        y = cond(
            quantizing,
            lambda: fake_quant.fake_quantize_channels(
                tf.clip_by_value(weights, -limits, limits), limits, bits
            ),
            lambda: tf.identity(weights),
        )

        def gradient(up: tf.Tensor) -> Any:
            beyond = tf.logical_and(quantizing, tf.abs(weights) > limits)
            inside = up * tf.cast(~beyond, up.dtype)
            pull = inside * (y - weights) / limits
            pull += up * tf.cast(beyond, up.dtype) * tf.sign(weights)
            ends = tf.reduce_sum(pull, axes, keepdims=True) * _gradient_factor(levels, count)
            return inside, ends * tf.cast(quantizing, up.dtype)

        return y, gradient

    return quantize(weights, limits)
