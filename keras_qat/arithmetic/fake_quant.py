"""Fake quantization in plain TensorFlow: no Keras, no state.

Fake quantization computes in float what an integer tensor would hold: a value is clipped to the
range and rounded to the nearest of its 2^bits levels. One level is one step, or LSB.

Activations may be in half precision: they are quantized in float32, and the results are rounded to
their type. float16 holds a level of 8 bits to 1/8 LSB, bfloat16 those far from zero to 1 LSB.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic import as_written, plain_operations
from keras_qat.arithmetic.as_written import must_not_fuse, product, quotient
from keras_qat.arithmetic.control_flow import Switch, cond, make_switch, straight_through
from keras_qat.arithmetic.gradient_masks import (
    Gates,
    apply_mask,
    mask_of_range,
    mask_of_relu,
    zero_outside_range,
)

LARGE, ROWS = 2**18, 32
"""From `LARGE` weights on, ranges per channel are computed in at most `ROWS` rows at once."""


def find_range(
    x: Any, bits: int = 8, symmetric: bool = False, narrow_range: bool = False
) -> tuple[Any, Any]:
    """Returns the smallest range that holds all of `x` and zero.

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


EXPONENT, BELOW = 0x7F800000, 0x007FFFFF
"""Bits of float32 that hold the exponent, and those of the fraction below it."""


def power_of_two(scale: Any) -> Any:
    """Returns the smallest power of two that is not below a float32 scale, exactly; 0 for 0."""
    bits = tf.bitwise.bitwise_and(tf.bitcast(scale, tf.int32) + BELOW, EXPONENT)
    return tf.where(tf.math.is_finite(scale), tf.bitcast(bits, tf.float32), scale)


def power_of_two_range(minimum: Any, maximum: Any, bits: int) -> tuple[Any, Any]:
    """Widens a symmetric range until its scale is a power of two."""
    scale = power_of_two(quotient(maximum - minimum, 2.0**bits - 1.0))
    half = 2.0 ** (bits - 1)
    return -half * scale, (half - 1.0) * scale


def power_of_two_limits(limits: Any, bits: int) -> Any:
    """Widens limits of weights until their scales are powers of two."""
    levels = 2.0 ** (bits - 1) - 1.0
    return levels * power_of_two(quotient(limits, levels))


def fake_quantize(
    x: Any, minimum: Any, maximum: Any, bits: int = 8, narrow_range: bool = False
) -> Any:
    """Rounds `x` to the levels of the range `minimum` to `maximum`.

    The range is nudged so that zero is a level. The gradient passes inside the nudged range and
    is zero outside it. TensorFlow's own op, as `tf.contrib.quantize` used it. On GPUs that would
    wait for the range, and XLA joins its multiplications and additions, so that numbers between two
    levels get other codes: there it is the same in single operations.

    Args:
        x: the tensor.
        minimum, maximum: scalars.
        bits, narrow_range: as in `QuantSpec`.
    """
    if must_not_fuse():  # What is rounded by plain operations has no gradient by itself.
        return fake_quantize_if(True, x, minimum, maximum, bits, narrow_range)
    return _values(x, minimum, maximum, bits, narrow_range)


def _values(x: Any, minimum: Any, maximum: Any, bits: int, narrow_range: bool) -> Any:
    op = tf.quantization.fake_quant_with_min_max_vars
    return op(x, minimum, maximum, num_bits=bits, narrow_range=narrow_range)


def apply_relu(x: Any, ceiling: float | None) -> Any:
    """Returns a ReLU of `x` that ends at the ceiling (infinity: nowhere); without one, `x`."""
    if ceiling is None:
        return x
    return tf.nn.relu(x) if ceiling == math.inf else tf.clip_by_value(x, 0.0, ceiling)


def fake_quantize_if(
    applies: Any,
    x: Any,
    minimum: Any,
    maximum: Any,
    bits: int = 8,
    narrow_range: bool = False,
    ceiling: float | None = None,
    source: Any = None,
    gates: Gates | None = None,
) -> Any:
    """Computes `fake_quantize` if `applies`, else returns `x`; only one branch is computed.

    With a `ceiling`, it does so for a ReLU of `x` that ends there (infinity: nowhere). A range that
    begins at zero clips where the ReLU does, so that one operation computes both.

    The gradient is that of the operations; it is written out, as that of a `tf.cond` takes long
    to trace. On CPUs it is one pass over `x`, which is kept for it, on GPUs one over a byte for
    each number.

    Args:
        applies: a bool, or a scalar tensor.
        x, minimum, maximum, bits, narrow_range: as in `fake_quantize`.
        ceiling: upper end of the ReLU; None if there is none.
        source: a `recompute.Source` of `x`, which a CPU does not keep then. There `applies` is
            True or False, and there is no ceiling.
        gates: those that it shares with other quantizers; by default its own.
    """
    if applies is False and ceiling is None:
        return x
    gates, applies = gates or Gates(), make_switch(applies)
    if must_not_fuse():
        return _fake_quantize_plainly(applies, x, minimum, maximum, bits, narrow_range, ceiling)
    on = applies.on if isinstance(applies, Switch) else True
    if ceiling is None:
        mask = mask_of_range(minimum, maximum, bits, narrow_range, gates, on)
    else:
        minimum, mask = 0.0, mask_of_relu(maximum, ceiling, gates, on)

    def quantizing(x: Any) -> Any:
        y = _values(tf.cast(x, tf.float32), minimum, maximum, bits, narrow_range)
        return tf.cast(y, x.dtype)

    def passing(x: Any) -> Any:
        return tf.identity(x) if ceiling is None else apply_relu(x, ceiling)

    def inside(x: Any, upstream: Any) -> Any:
        return apply_mask(mask, upstream, x)

    def passed(x: Any, upstream: Any) -> Any:
        if ceiling is None:
            return tf.identity(upstream)
        if ceiling == math.inf:
            return tf.raw_ops.ReluGrad(gradients=upstream, features=x)
        return apply_mask(mask_of_relu(ceiling, ceiling, gates), upstream, x)

    @tf.custom_gradient
    def quantized(x: Any) -> Any:
        y = cond(applies, lambda: quantizing(x), lambda: passing(x))
        if isinstance(applies, Switch):  # It moves the ends.
            return y, partial(inside, x)
        return y, lambda upstream: cond(
            applies, lambda: inside(x, upstream), lambda: passed(x, upstream)
        )

    @tf.custom_gradient
    def quantized_source(*_: Any) -> Any:
        if source.derivative is not None:
            slope = zero_outside_range(source.derivative, x, minimum, maximum, bits, narrow_range)
            return quantizing(x), lambda upstream: upstream * slope

        def gradient(upstream: Any) -> Any:
            with tf.control_dependencies([upstream]):  # Not before.
                x, back = source.again()
            return back(inside(x, upstream))

        return quantizing(x), gradient

    return quantized(x) if source is None else quantized_source(*source.inputs)


def _fake_quantize_plainly(
    applies: Any,
    x: Any,
    minimum: Any,
    maximum: Any,
    bits: int,
    narrow_range: bool,
    ceiling: float | None,
) -> Any:
    """Computes `fake_quantize_if`, and keeps which numbers pass the gradient."""
    is_relu = ceiling is not None

    def quantizing(x: Any) -> tuple[Any, Any]:
        ends = 0.0 if is_relu else minimum, maximum
        wide = tf.cast(x, tf.float32)
        y, inside = plain_operations.fake_quantize(wide, *ends, bits, narrow_range, is_relu)
        return tf.cast(y, x.dtype), inside

    def passing(x: Any) -> tuple[Any, Any]:
        if ceiling is None:
            return tf.identity(x), tf.ones_like(x, tf.bool)
        return apply_relu(x, ceiling), tf.logical_and(x > 0, x < ceiling)

    @tf.custom_gradient
    def quantized(x: Any) -> Any:
        y, inside = cond(applies, lambda: quantizing(x), lambda: passing(x))
        return y, lambda upstream: plain_operations.zero_unless(inside, upstream)

    return quantized(x)


def channel_limits(weights: Any, channel_axes: tuple[int, ...]) -> Any:
    """Returns the largest magnitude in each output channel, shaped to broadcast.

    A channel of zeros gets the limit 1: any scale represents it.
    """
    return replace_zeros(largest_magnitudes(weights, channel_axes))


def replace_zeros(limits: Any) -> Any:
    """Returns limits with 1 in place of 0, as any scale represents zeros."""
    return tf.where(limits > 0, limits, 1.0)


def largest_magnitudes(weights: Any, channel_axes: tuple[int, ...]) -> Any:
    """Returns the largest magnitude in each output channel, 0 for a channel of zeros."""
    weights = tf.convert_to_tensor(weights)
    rank = len(weights.shape)
    reduced = [axis for axis in range(rank) if axis - rank not in channel_axes]
    size = weights.shape.num_elements()
    if channel_axes == (-1,) and size is not None and size >= LARGE and not as_written.has_gpu():
        return _column_limits(weights)
    return tf.reduce_max(tf.abs(weights), axis=reduced, keepdims=True)


def _column_limits(weights: Any) -> Any:
    """Returns the largest magnitude in each column of a large kernel.

    TensorFlow reduces a few columns at a time, from the first row to the last. Some rows at a time
    stay in the cache for the next columns, and no magnitudes are written.
    """
    *outer, columns = weights.shape
    rows = math.prod(outer)
    at_once = max(count for count in range(1, ROWS + 1) if rows % count == 0)
    blocks = tf.reshape(weights, [rows // at_once, at_once, *[1] * (len(outer) - 2), columns])
    highest, lowest = tf.reduce_max(blocks, 1, True), tf.reduce_min(blocks, 1, True)
    limits = tf.reduce_max(tf.maximum(highest, -lowest), 0, True)
    return limits if len(outer) > 1 else limits[0]


def quantize_channels(weights: Any, limits: Any, bits: int = 8) -> Any:
    """Quantizes `weights` to whole numbers up to 2^(bits - 1) - 1, zero being 0.

    They are those of TensorFlow's `fake_quant_with_min_max_vars_per_channel` with a narrow range,
    operation by operation; that op itself is some 40 times slower on a CPU. `limits` are the
    largest magnitudes of the channels, shaped to broadcast.
    """
    return ChannelSteps.of(limits, bits).codes(weights)


class ChannelSteps(NamedTuple):
    """The steps of weights with a range per channel, shaped to broadcast against them.

    Args:
        levels: the largest quantized value.
        scale: the sizes of the steps.
        inverse: one over them.
        shift: what is added to the weights to make all of them positive.
    """

    levels: float
    scale: Any
    inverse: Any
    shift: Any

    @classmethod
    def of(cls, limits: Any, bits: int) -> ChannelSteps:
        """Steps for the largest magnitudes of channels; none may be 0."""
        levels = float(2 ** (bits - 1) - 1)
        scale = quotient(limits, levels)
        return cls(levels, scale, quotient(1.0, scale), levels * scale)

    def codes(self, weights: Any) -> Any:
        """Rounds weights to whole steps."""
        # Multiplied, not divided, and shifted to positive numbers first, as in TensorFlow's kernel.
        times = product if must_not_fuse() else tf.multiply
        steps = times(weights + self.shift, self.inverse)
        return tf.floor(steps - (self.levels - 0.5))

    def rounded(self, weights: Any) -> Any:
        """Rounds weights to the nearest step."""
        return self.codes(weights) * self.scale


def fake_quantize_channels(weights: Any, limits: Any, bits: int = 8) -> Any:
    """Rounds `weights` to 2^bits - 1 levels from -`limits` to `limits`.

    As the limits are those of the weights, nothing is clipped, so the gradient passes everywhere.
    """
    return straight_through(lambda weights: ChannelSteps.of(limits, bits).rounded(weights), weights)


def fake_quantize_average(x: Any, minimum: Any, maximum: Any, bits: int = 8) -> Any:
    """Rounds averages of quantized values to the levels of their own range, as kernels do.

    Averages of codes often lie halfway between two codes. TFLite rounds those away from code
    zero of the signed type, which `fake_quantize` does not. The gradient passes everywhere, as
    averages do not leave the range.
    """

    def rounded(averages: Any) -> Any:
        x, levels = tf.cast(averages, tf.float32), float(2**bits - 1)
        low, high = (tf.cast(end, tf.float32) for end in (minimum, maximum))
        scale = (high - low) / levels
        scale = tf.where(scale > 0, scale, 1.0)  # Of zeros only, before anything else was seen.
        zero_point = tf.clip_by_value(tf.floor(0.5 - low / scale), 0.0, levels) - 2 ** (bits - 1)
        codes = x / scale + zero_point
        # Halves are off by float rounding: far less than this for any window up to 16x16.
        codes = tf.sign(codes) * tf.floor(tf.abs(codes) + 0.501)
        return tf.cast((codes - zero_point) * scale, averages.dtype)

    return straight_through(rounded, x)
