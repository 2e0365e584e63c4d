"""Fake quantization in plain TensorFlow: no Keras, no state.

Fake quantization computes in float what an integer tensor would hold: a value is clipped to the
range and rounded to the nearest of its 2^bits levels. One level is one step, or LSB.

Activations may be in half precision: they are quantized in float32, and the results are rounded to
their type. float16 holds a level of 8 bits to 1/8 LSB, bfloat16 those far from zero to 1 LSB.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.as_written import quotient
from keras_qat.arithmetic.control_flow import cond, straight_through

FAR = 1e38
"""A number beyond all ranges."""

SIX = 6.0 * (1 - 2.0**-20)
"""Maximum of a range that was brought to 0..6: inside of ReLU6."""

LARGE, ROWS = 2**18, 32
"""From `LARGE` weights on, ranges per channel are computed in at most `ROWS` rows at once."""


def range_of(
    x: Any, bits: int = 8, symmetric: bool = False, narrow_range: bool = False
) -> tuple[Any, Any]:
    """Smallest range that holds all of `x` and zero.

    Args:
        x: the tensor.
        bits, symmetric, narrow_range: as in `QuantSpec`. The wide symmetric range keeps its
            zero point at the middle code, so its negative side is one step longer.

    Source: `tf.contrib.quantize`'s `LastValueQuantize` and `MovingAvgQuantize`.
    """
    low = tf.minimum(tf.cast(tf.reduce_min(x), tf.float32), 0.0)
    high = tf.maximum(tf.cast(tf.reduce_max(x), tf.float32), 0.0)
    if not symmetric:
        return low, high
    ratio = -1.0 if narrow_range else -(2**bits - 2) / 2**bits
    return tf.minimum(low, high / ratio), tf.maximum(high, low * ratio)


def fake_quantize(
    x: Any, minimum: Any, maximum: Any, bits: int = 8, narrow_range: bool = False
) -> Any:
    """Rounds `x` to the levels of the range `minimum` to `maximum`.

    The range is nudged so that zero is a level. The gradient passes inside the nudged range and
    is zero outside it. TensorFlow's own op, as `tf.contrib.quantize` used it.

    Args:
        x: the tensor.
        minimum, maximum: scalars.
        bits, narrow_range: as in `QuantSpec`.
    """
    op = tf.quantization.fake_quant_with_min_max_vars
    return op(x, minimum, maximum, num_bits=bits, narrow_range=narrow_range)


def are_numbers(minimum: Any, maximum: Any) -> bool:
    """Whether a range is known while a graph is traced."""
    return isinstance(minimum, float) and isinstance(maximum, float)


def fake_quantize_if(
    applies: Any,
    x: Any,
    minimum: Any,
    maximum: Any,
    bits: int = 8,
    narrow_range: bool = False,
    ceiling: float | None = None,
    source: Any = None,
) -> Any:
    """`fake_quantize` if `applies`, else `x` as it is. One branch is computed, both ways.

    With a `ceiling`, the same of a ReLU of `x` that ends there (infinity: nowhere). A range that
    begins at zero clips where the ReLU does, so that one operation computes both.

    The gradient is that of the operations; it is written out, as that of a `tf.cond` takes long
    to trace, and as one pass over `x`, which is kept for it.

    Args:
        applies: a bool, or a scalar tensor.
        x, minimum, maximum, bits, narrow_range: as in `fake_quantize`.
        ceiling: upper end of the ReLU; None if there is none.
        source: a `layers.again.Source` of `x`, which is not kept then but computed again.
    """
    if applies is False and ceiling is None:
        return x

    def quantizing(x: Any) -> Any:
        y = fake_quantize(tf.cast(x, tf.float32), minimum, maximum, bits, narrow_range)
        return tf.cast(y, x.dtype)

    def passing(x: Any) -> Any:
        if ceiling is None:
            return tf.identity(x)
        return tf.nn.relu(x) if ceiling == math.inf else tf.clip_by_value(x, 0.0, ceiling)

    def inside(x: Any, upstream: Any) -> Any:
        if ceiling is not None:  # Zero is a level already.
            return _passed_within(upstream, x, None, maximum, ceiling)
        if are_numbers(minimum, maximum):
            gradient = tf.raw_ops.FakeQuantWithMinMaxArgsGradient(
                gradients=tf.cast(upstream, tf.float32),
                inputs=tf.cast(x, tf.float32),
                min=minimum,
                max=maximum,
                num_bits=bits,
                narrow_range=narrow_range,
            )
            return tf.cast(gradient, x.dtype)
        # The nudged ends, in two operations.
        low, high = tf.unstack(fake_quantize([-FAR, FAR], minimum, maximum, bits, narrow_range))
        return _passed_within(upstream, x, low, high, math.inf)

    def passed(x: Any, upstream: Any) -> Any:
        if ceiling is None:
            return tf.identity(upstream)
        if ceiling == math.inf:
            return tf.raw_ops.ReluGrad(gradients=upstream, features=x)
        return _passed_within(upstream, x, None, ceiling, ceiling)

    @tf.custom_gradient
    def quantized(x: Any) -> Any:
        y = cond(applies, lambda: quantizing(x), lambda: passing(x))
        return y, lambda upstream: cond(
            applies, lambda: inside(x, upstream), lambda: passed(x, upstream)
        )

    @tf.custom_gradient
    def quantized_source(*_: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            with tf.control_dependencies([upstream]):  # Not before.
                x, back = source.again()
            return back(inside(x, upstream) if applies else passed(x, upstream))

        return quantizing(x) if applies else passing(x), gradient

    return quantized(x) if source is None else quantized_source(*source.inputs)


def _passed_within(upstream: Any, x: Any, low: Any, high: Any, ceiling: float) -> Any:
    """`upstream` where `x` is from `low` to `high` and below `ceiling`, else zero.

    In one pass: the gradient of a ReLU6 at `x` brought to 0..6. A mask takes four: two comparisons,
    what both say, and the choice. The ends are inside, and so is a millionth of the range beyond.

    Args:
        low: None for zero, which is outside.
    """
    with tf.control_dependencies([upstream]):  # Going forward it would be kept until here.
        x = tf.identity(x)
    dtype, x = upstream.dtype, tf.cast(x, tf.float32)
    if low is None:
        factor, least = SIX / high, 6.0 / ceiling
        if not isinstance(factor, float):
            x *= tf.maximum(factor, least)
        elif max(factor, least) != 1.0:  # A range up to 6 is that of ReLU6 itself.
            x *= max(factor, least)
    else:  # Of zeros alone a range is empty.
        size = tf.maximum(high - low, 1e-20)
        x = (x - (low - size * 2.0**-21)) * (SIX / size)
    gradients = tf.cast(upstream, tf.float32)
    return tf.cast(tf.raw_ops.Relu6Grad(gradients=gradients, features=x), dtype)


def nudged_range(
    minimum: Any, maximum: Any, bits: int = 8, narrow_range: bool = False
) -> tuple[Any, Any]:
    """The range whose ends are levels, as is zero: what `fake_quantize` clips to.

    In the order of operations of TensorFlow's kernel, so equal to the last bit.
    """
    lowest, highest = float(narrow_range), float(2**bits - 1)
    scale = (maximum - minimum) / (highest - lowest)
    # Of zeros alone, as behind a BatchNormalization that starts with gamma = 0: they are inside.
    divisor = tf.where(scale > 0, scale, tf.ones_like(scale))
    zero_point = tf.floor(lowest - minimum / divisor + 0.5)
    zero_point = tf.clip_by_value(zero_point, lowest, highest)
    return (lowest - zero_point) * scale, (highest - zero_point) * scale


def channel_limits(weights: Any, channel_axes: tuple[int, ...]) -> Any:
    """Largest magnitude in each output channel, shaped to broadcast against `weights`.

    A channel of zeros gets the limit 1: any scale represents it.
    """
    weights = tf.convert_to_tensor(weights)
    rank = len(weights.shape)
    reduced = [axis for axis in range(rank) if axis - rank not in channel_axes]
    size = weights.shape.num_elements()
    if channel_axes == (-1,) and size is not None and size >= LARGE:
        limits = tf.reshape(_column_limits(weights), [1] * (rank - 1) + [-1])
    else:
        limits = tf.reduce_max(tf.abs(weights), axis=reduced, keepdims=True)
    return tf.where(limits > 0, limits, 1.0)


def _column_limits(weights: Any) -> Any:
    """Largest magnitude in each column of a large kernel.

    TensorFlow reduces a few columns at a time, from the first row to the last. Some rows at a time
    stay in the cache for the next columns, and no magnitudes are written.
    """
    columns = weights.shape[-1]
    rows = weights.shape.num_elements() // columns
    at_once = max(count for count in range(1, ROWS + 1) if rows % count == 0)
    blocks = tf.reshape(weights, [rows // at_once, at_once, columns])
    highest = tf.reduce_max(tf.reduce_max(blocks, 1), 0)
    return tf.maximum(highest, -tf.reduce_min(tf.reduce_min(blocks, 1), 0))


def quantize_channels(weights: Any, limits: Any, bits: int = 8) -> Any:
    """The quantized values of `weights`, whole numbers up to 2^(bits - 1) - 1, zero being 0.

    They are those of TensorFlow's `fake_quant_with_min_max_vars_per_channel` with a narrow range,
    operation by operation; that op itself is some 40 times slower on a CPU. `limits` are the
    largest magnitudes of the channels, shaped to broadcast.
    """
    levels = float(2 ** (bits - 1) - 1)
    return _whole_steps(weights, quotient(limits, levels), levels)


def _whole_steps(weights: Any, scale: Any, levels: float) -> Any:
    """`weights` in steps of `scale`, rounded."""
    # Multiplied, not divided, and shifted to whole numbers first, as in TensorFlow's kernel.
    steps = (weights + levels * scale) * quotient(1.0, scale)
    return tf.floor(steps - (levels - 0.5))


def fake_quantize_channels(weights: Any, limits: Any, bits: int = 8) -> Any:
    """Rounds `weights` to 2^bits - 1 levels from -`limits` to `limits`.

    As the limits are those of the weights, nothing is clipped, so the gradient passes everywhere.
    """
    levels = float(2 ** (bits - 1) - 1)

    def rounded(weights: Any) -> Any:
        scale = quotient(limits, levels)
        return _whole_steps(weights, scale, levels) * scale

    return straight_through(rounded, weights)


def fake_quantize_average(x: Any, minimum: Any, maximum: Any, bits: int = 8) -> Any:
    """Rounds averages of quantized values to the levels of their own range, as kernels do.

    Averages of codes often lie halfway between two codes. TFLite rounds those away from code
    zero of the signed type, which `fake_quantize` does not. The gradient passes everywhere, as
    averages do not leave the range.
    """

    def rounded(given: Any) -> Any:
        x, levels = tf.cast(given, tf.float32), float(2**bits - 1)
        low, high = (tf.cast(end, tf.float32) for end in (minimum, maximum))
        scale = (high - low) / levels
        scale = tf.where(scale > 0, scale, 1.0)  # Of zeros only, before anything else was seen.
        zero_point = tf.clip_by_value(tf.round(-low / scale), 0.0, levels) - 2 ** (bits - 1)
        codes = x / scale + zero_point
        # Halves are off by float rounding: far less than this for any window up to 16x16.
        codes = tf.sign(codes) * tf.floor(tf.abs(codes) + 0.501)
        return tf.cast((codes - zero_point) * scale, given.dtype)

    return straight_through(rounded, x)
