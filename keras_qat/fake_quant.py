"""All quantization arithmetic, in plain TensorFlow: no Keras, no state.

Fake quantization computes in float what an integer tensor would hold: a value is clipped to the
range and rounded to the nearest of its 2^bits levels. One level is one step, or LSB.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = [
    "channel_limits",
    "fake_quantize",
    "fake_quantize_average",
    "fake_quantize_channels",
    "range_of",
    "scale_of",
]


def range_of(
    x: Any, bits: int = 8, symmetric: bool = False, narrow_range: bool = False, axes: Any = None
) -> tuple[Any, Any]:
    """Smallest range that holds all of `x` and zero.

    Args:
        x: the tensor.
        bits, symmetric, narrow_range: as in `QuantSpec`. The wide symmetric range keeps its
            zero point at the middle code, so its negative side is one step longer.
        axes: axes to reduce; all by default.

    Returns:
        Minimum and maximum, scalars or one for each channel.

    Source: `tf.contrib.quantize`'s `LastValueQuantize` and `MovingAvgQuantize`.
    """
    low = tf.minimum(tf.reduce_min(x, axes), 0.0)
    high = tf.maximum(tf.reduce_max(x, axes), 0.0)
    if not symmetric:
        return low, high
    ratio = -1.0 if narrow_range else -(2**bits - 2) / 2**bits
    return tf.minimum(low, high / ratio), tf.maximum(high, low * ratio)


def fake_quantize(
    x: Any, minimum: Any, maximum: Any, bits: int = 8, narrow_range: bool = False
) -> Any:
    """Rounds `x` to the levels of the range `minimum` to `maximum`.

    The range is nudged so that zero is a level. The gradient passes inside the nudged range and
    is zero outside it. TensorFlow's own ops, as `tf.contrib.quantize` used them.

    Args:
        x: the tensor; with ranges per channel it has one, two or four axes.
        minimum, maximum: scalars, or one for each entry of the last axis.
        bits, narrow_range: as in `QuantSpec`.
    """
    per_channel = len(minimum.shape) > 0
    op = (
        tf.quantization.fake_quant_with_min_max_vars_per_channel
        if per_channel
        else tf.quantization.fake_quant_with_min_max_vars
    )
    return op(x, minimum, maximum, num_bits=bits, narrow_range=narrow_range)


def channel_limits(weights: Any, channel_axes: tuple[int, ...]) -> Any:
    """Largest magnitude in each output channel, shaped to broadcast against `weights`.

    A channel of zeros gets the limit 1: any scale represents it.
    """
    rank = len(weights.shape)
    reduced = [axis for axis in range(rank) if axis - rank not in channel_axes]
    limits = tf.reduce_max(tf.abs(weights), axis=reduced, keepdims=True)
    return tf.where(limits > 0, limits, tf.ones_like(limits))


def fake_quantize_channels(weights: Any, limits: Any, bits: int = 8) -> Any:
    """Rounds `weights` to 2^bits - 1 levels from -`limits` to `limits`.

    The values are those of TensorFlow's `fake_quant_with_min_max_vars_per_channel` with a narrow
    range, operation by operation; that op itself is some 40 times slower on a CPU. As the limits
    are those of the weights, nothing is clipped, so the gradient passes everywhere.
    """

    @tf.custom_gradient
    def straight_through(weights: Any) -> Any:
        levels = float(2 ** (bits - 1) - 1)
        scale = limits / levels
        # Multiplied, not divided, and shifted to whole codes first, as in TensorFlow's kernel.
        steps = (weights + levels * scale) * (1.0 / scale)
        return tf.floor(steps - levels + 0.5) * scale, lambda upstream: upstream

    return straight_through(weights)


def fake_quantize_average(x: Any, minimum: Any, maximum: Any, bits: int = 8) -> Any:
    """Rounds averages of quantized values to the levels of their own range, as kernels do.

    Averages of codes often lie halfway between two codes. TFLite rounds those away from code
    zero of the signed type, which `fake_quantize` does not. The gradient passes everywhere, as
    averages do not leave the range.
    """

    @tf.custom_gradient
    def straight_through(x: Any) -> Any:
        levels = float(2**bits - 1)
        scale = (maximum - minimum) / levels
        zero_point = tf.clip_by_value(tf.round(-minimum / scale), 0.0, levels) - 2 ** (bits - 1)
        codes = x / scale + zero_point
        # Halves are off by float rounding: far less than this for any window up to 16x16.
        codes = tf.sign(codes) * tf.floor(tf.abs(codes) + 0.501)
        return (codes - zero_point) * scale, lambda upstream: upstream

    return straight_through(x)


def scale_of(minimum: float, maximum: float, bits: int = 8) -> tuple[float, int]:
    """Step width and zero point (counted from code 0) of a range, as `fake_quantize` nudges it."""
    levels = 2**bits - 1
    scale = (maximum - minimum) / levels
    if scale == 0.0:
        return 1.0, 0
    return scale, int(min(max(round(-minimum / scale), 0), levels))
