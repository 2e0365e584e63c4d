"""Fake quantization as stateless TensorFlow functions.

Fake quantization rounds float values to the values that an integer tensor can represent. It clips a
value to the range, and rounds to the nearest of 2^bits levels. Levels are one step (LSB) apart.

With mixed precision, quantization computes in float32, and then casts the result. With 8 bits, the
cast changes values by up to 1/8 LSB in float16, and by up to 1 LSB in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic import plain_operations
from keras_qat.arithmetic.control_flow import Switch, cond, make_switch, straight_through
from keras_qat.arithmetic.gradient_masks import zero_outside_range, zero_outside_relu
from keras_qat.arithmetic.plain_operations import Scalar, must_not_fuse, product, quotient

Gradient = Callable[[tf.Tensor], tf.Tensor]

LARGE, ROWS = 2**18, 32
"""`channel_limits` reads kernels with at least `LARGE` weights in blocks of up to `ROWS` rows."""


def find_range(
    x: tf.Tensor, bits: int = 8, symmetric: bool = False, narrow_range: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the minimum and maximum of the smallest range that contains `x` and zero.

    The range is the same as in `tf.contrib.quantize`. The arguments are those of `QuantSpec`. A
    symmetric range of 8 bits has 128 steps below zero (127 if `narrow_range`) and 127 above.
    """
    low = tf.minimum(tf.cast(tf.reduce_min(x), tf.float32), 0.0)
    high = tf.maximum(tf.cast(tf.reduce_max(x), tf.float32), 0.0)
    if not symmetric:
        return low, high
    ratio = -1.0 if narrow_range else -(2**bits - 2) / 2**bits
    return tf.minimum(low, high / ratio), tf.maximum(high, low * ratio)


EXPONENT, BELOW = 0x7F800000, 0x007FFFFF
"""Bit masks of the exponent and the fraction (mantissa) of a float32 value."""


def power_of_two(scale: tf.Tensor) -> tf.Tensor:
    """Rounds a float32 scale up to a power of two. 0 stays 0."""
    bits = tf.bitwise.bitwise_and(tf.bitcast(scale, tf.int32) + BELOW, EXPONENT)
    return tf.where(tf.math.is_finite(scale), tf.bitcast(bits, tf.float32), scale)


def power_of_two_range(minimum: Scalar, maximum: Scalar, bits: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Widens a symmetric range until the scale is a power of two."""
    scale = power_of_two(quotient(maximum - minimum, 2.0**bits - 1.0))
    half = 2.0 ** (bits - 1)
    return -half * scale, (half - 1.0) * scale


def power_of_two_limits(limits: tf.Tensor, bits: int) -> tf.Tensor:
    """Increases the largest magnitude of each channel until its scale is a power of two."""
    levels = 2.0 ** (bits - 1) - 1.0
    return levels * power_of_two(quotient(limits, levels))


def fake_quantize(
    x: tf.Tensor, minimum: Scalar, maximum: Scalar, bits: int = 8, narrow_range: bool = False
) -> tf.Tensor:
    """Computes `tf.quantization.fake_quant_with_min_max_vars` on any device.

    `x` is rounded to 2^bits levels from `minimum` to `maximum`. The range is first nudged (shifted
    slightly) to make zero a level. The gradient is 1 inside the nudged range, and 0 outside. On
    GPUs and in XLA, TensorFlow's operation is slow or rounds differently. There, basic operations
    compute the same values as on a CPU.
    """
    if must_not_fuse():  # Basic operations have no straight-through gradient.
        return fake_quantize_if(True, x, minimum, maximum, bits, narrow_range)
    return _round_to_levels(x, minimum, maximum, bits, narrow_range)


def _round_to_levels(
    x: tf.Tensor, minimum: Scalar, maximum: Scalar, bits: int, narrow_range: bool
) -> tf.Tensor:
    op = tf.quantization.fake_quant_with_min_max_vars
    return op(x, minimum, maximum, num_bits=bits, narrow_range=narrow_range)


def apply_relu(x: tf.Tensor, ceiling: float | None) -> tf.Tensor:
    """Computes a ReLU: `ceiling` is 6 for ReLU6, and `inf` for a plain ReLU. None returns `x`."""
    if ceiling is None:
        return x
    return tf.nn.relu(x) if ceiling == math.inf else tf.clip_by_value(x, 0.0, ceiling)


def fake_quantize_if(
    applies: bool | tf.Tensor,
    x: tf.Tensor,
    minimum: Scalar,
    maximum: Scalar,
    bits: int = 8,
    narrow_range: bool = False,
    ceiling: float | None = None,
    source: Any = None,
) -> tf.Tensor:
    """Computes `fake_quantize` if `applies`, otherwise returns `x`.

    With a `ceiling`, a ReLU is applied to `x` first. This needs no extra operation, because
    quantization also clips negative values.

    Args:
        applies: a bool, or a scalar tensor. For example, False before `quant_delay` steps.
        x, minimum, maximum, bits, narrow_range: as in `fake_quantize`.
        ceiling: 6 for ReLU6, `inf` for a plain ReLU. None means no ReLU.
        source: a `recompute.Source` that computes `x` again for the gradient. This saves memory on
            a CPU. `applies` must then be a bool, and `ceiling` must be None.
    """
    if applies is False and ceiling is None:
        return x
    condition = make_switch(applies)
    if must_not_fuse():
        return _fake_quantize_plainly(condition, x, minimum, maximum, bits, narrow_range, ceiling)
    on = condition.on if isinstance(condition, Switch) else True
    minimum = minimum if ceiling is None else 0.0

    def quantize(x: tf.Tensor) -> tf.Tensor:
        y = _round_to_levels(tf.cast(x, tf.float32), minimum, maximum, bits, narrow_range)
        return tf.cast(y, x.dtype)

    def pass_on(x: tf.Tensor) -> tf.Tensor:
        return tf.identity(x) if ceiling is None else apply_relu(x, ceiling)

    def differentiate_quantized(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        if ceiling is None:
            return zero_outside_range(upstream, x, minimum, maximum, bits, narrow_range, on)
        return zero_outside_relu(upstream, x, maximum, ceiling, on)

    def differentiate_passed(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        if ceiling is None:
            return tf.identity(upstream)
        if ceiling == math.inf:
            return tf.raw_ops.ReluGrad(gradients=upstream, features=x)
        return zero_outside_relu(upstream, x, ceiling, ceiling)

    @tf.custom_gradient
    def compute(x: tf.Tensor) -> tuple[tf.Tensor, Gradient]:
        y = cond(condition, lambda: quantize(x), lambda: pass_on(x))
        if isinstance(condition, Switch):  # One gradient, which reads `on`, serves both branches.
            return y, partial(differentiate_quantized, x)
        return y, lambda upstream: cond(
            condition,
            lambda: differentiate_quantized(x, upstream),
            lambda: differentiate_passed(x, upstream),
        )

    if source is None:
        return compute(x)

    @tf.custom_gradient
    def compute_from_source(*_: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], object]]:
        if source.derivative is not None:
            slope = zero_outside_range(source.derivative, x, minimum, maximum, bits, narrow_range)
            return quantize(x), lambda upstream: upstream * slope

        def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies([upstream]):  # Wait until the gradient needs `x`.
                x, back = source.again()
            return back(differentiate_quantized(x, upstream))

        return quantize(x), gradient

    return compute_from_source(*source.inputs)


def _fake_quantize_plainly(
    applies: bool | tf.Tensor | Switch,
    x: tf.Tensor,
    minimum: Scalar,
    maximum: Scalar,
    bits: int,
    narrow_range: bool,
    ceiling: float | None,
) -> tf.Tensor:
    """Compute `fake_quantize_if` on a GPU or in XLA."""
    is_relu = ceiling is not None

    def quantize(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        ends = 0.0 if is_relu else minimum, maximum
        wide = tf.cast(x, tf.float32)
        y, inside = plain_operations.fake_quantize(wide, *ends, bits, narrow_range, is_relu)
        return tf.cast(y, x.dtype), inside

    def pass_on(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if ceiling is None:
            return tf.identity(x), tf.ones_like(x, tf.bool)
        return apply_relu(x, ceiling), tf.logical_and(x > 0, x < ceiling)

    @tf.custom_gradient
    def compute(x: tf.Tensor) -> tuple[tf.Tensor, Gradient]:
        y, inside = cond(applies, lambda: quantize(x), lambda: pass_on(x))
        return y, lambda upstream: plain_operations.zero_unless(inside, upstream)

    return compute(x)


def channel_limits(weights: tf.Tensor, channel_axes: tuple[int, ...]) -> tf.Tensor:
    """Returns the largest magnitude of the weights in each channel, in a shape that broadcasts.

    A channel of zeros gets the limit 1 instead of 0, to avoid a division by zero.
    """
    weights = tf.convert_to_tensor(weights)
    rank = len(weights.shape)
    reduced = [axis for axis in range(rank) if axis - rank not in channel_axes]
    size = weights.shape.num_elements()
    is_large = size is not None and size >= LARGE
    if channel_axes == (-1,) and is_large and not plain_operations.has_gpu():
        limits = _find_column_limits(weights)
    else:
        limits = tf.reduce_max(tf.abs(weights), axis=reduced, keepdims=True)
    return tf.where(limits > 0, limits, 1.0)


def _find_column_limits(weights: tf.Tensor) -> tf.Tensor:
    """Compute `channel_limits` of the last axis, for a large kernel on a CPU.

    It reduces blocks of rows that fit in the cache. `tf.reduce_max` is slow for large kernels.
    """
    *outer, columns = weights.shape
    rows = math.prod(outer)
    at_once = max(count for count in range(1, ROWS + 1) if rows % count == 0)
    blocks = tf.reshape(weights, [rows // at_once, at_once, *[1] * (len(outer) - 2), columns])
    highest, lowest = tf.reduce_max(blocks, 1, True), tf.reduce_min(blocks, 1, True)
    limits = tf.reduce_max(tf.maximum(highest, -lowest), 0, True)
    return limits if len(outer) > 1 else limits[0]


def quantize_channels(weights: tf.Tensor, limits: tf.Tensor, bits: int = 8) -> tf.Tensor:
    """Quantizes `weights` to integers, stored as floats. With 8 bits, they are -127 to 127.

    Weights equal to `limits` (from `channel_limits`) become 127. TensorFlow's
    `fake_quant_with_min_max_vars_per_channel` rounds the same, but is 40 times slower on a CPU.
    """
    levels = 2.0 ** (bits - 1) - 1.0
    scale = quotient(limits, levels)
    # Like TensorFlow's kernel, shift values to be positive, and multiply by the inverse scale.
    times = product if must_not_fuse() else tf.multiply
    steps = times(weights + levels * scale, quotient(1.0, scale))
    return tf.floor(steps - (levels - 0.5))


def fake_quantize_channels(weights: tf.Tensor, limits: tf.Tensor, bits: int = 8) -> tf.Tensor:
    """Rounds `weights` to 2^bits - 1 levels from -`limits` to `limits`, with a gradient of 1."""
    scale = quotient(limits, 2.0 ** (bits - 1) - 1.0)
    return straight_through(lambda x: quantize_channels(x, limits, bits) * scale, weights)


def fake_quantize_average(
    x: tf.Tensor, minimum: Scalar, maximum: Scalar, bits: int = 8
) -> tf.Tensor:
    """Rounds the output of average pooling to the levels of its range, like TFLite's kernels.

    Averages are often halfway between two quantized values. TFLite rounds these halves away from
    the quantized value 0, but `fake_quantize` rounds them up. The gradient is 1 everywhere.
    """

    def average(averages: tf.Tensor) -> tf.Tensor:
        x, levels = tf.cast(averages, tf.float32), float(2**bits - 1)
        low, high = (tf.cast(end, tf.float32) for end in (minimum, maximum))
        scale = (high - low) / levels
        scale = tf.where(scale > 0, scale, 1.0)  # The range is empty after a first batch of zeros.
        zero_point = tf.clip_by_value(tf.floor(0.5 - low / scale), 0.0, levels) - 2 ** (bits - 1)
        q = x / scale + zero_point
        # 0.001 is far more than the float rounding error of halves for windows up to 16x16.
        q = tf.sign(q) * tf.floor(tf.abs(q) + 0.501)
        return tf.cast((q - zero_point) * scale, averages.dtype)

    return straight_through(average, x)
