"""Functions that round in the same way on every device, in eager mode and in graphs.

TensorFlow's graph optimizer rewrites arithmetic. For example, it multiplies by `1 / c` instead of
dividing by a constant `c`. XLA and GPU kernels fuse `x * y + z`, and round only once. Such rewrites
change the last bits, and therefore quantized values. The functions in this module use operations
that are not rewritten.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

Scalar: TypeAlias = float | tf.Tensor

TINY = float(np.finfo(np.float32).tiny)
"""The smallest positive normal float32 value."""
BEYOND = 1 + 2.0**-20
"""Factor that widens a range, because float rounding can make its ends slightly too small."""


def is_in_xla() -> bool:
    """Returns True while a graph is traced with `jit_compile=True`."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph)


def has_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def must_not_fuse() -> bool:
    """Returns True if XLA or a GPU may fuse `x * y + z`. Use `product(x, y)` to prevent that."""
    return is_in_xla() or has_gpu()


def product(x: Scalar, y: tf.Tensor) -> tf.Tensor:
    """Computes x * y, and prevents fusion with a sum. The result is 0 if y is 0."""
    x = tf.convert_to_tensor(x, dtype=getattr(y, "dtype", None))
    if x.dtype == tf.float32 and is_in_xla():
        # XLA would fuse a float32 product with a sum. A float64 product is exact, then rounded.
        return tf.cast(tf.cast(x, tf.float64) * tf.cast(y, tf.float64), tf.float32)
    return tf.raw_ops.MulNoNan(x=x, y=y)


def quotient(x: Scalar, y: Scalar) -> tf.Tensor:
    """Computes x / y, correctly rounded. The result is 0 if y is 0."""
    x = tf.convert_to_tensor(x, dtype=getattr(y, "dtype", None))
    y = tf.cast(y, x.dtype)
    if x.dtype == tf.float32 and is_in_xla():
        # XLA multiplies by 1 / y if y is constant. A quarter of XLA's quotients on GPUs are wrong
        # by one bit. In float64, x * (1 / y) rounds to the same float32 value as x / y, because
        # x / y is at least 2^-49 away from the middle between two float32 values.
        wide = tf.math.divide_no_nan(tf.ones([], tf.float64), tf.cast(y, tf.float64))
        return tf.cast(tf.raw_ops.MulNoNan(x=tf.cast(x, tf.float64), y=wide), x.dtype)
    return tf.raw_ops.DivNoNan(x=x, y=y)


def gather(table: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Computes `tf.gather(table, positions)` faster, for a one-dimensional table."""
    return tf.gather_nd(table, positions[..., tf.newaxis])


def hide_constant(value: float) -> tf.Tensor:
    """Returns a float32 constant that TensorFlow's graph optimizer does not recognize.

    The optimizer would turn `(x - y) - 0.5` into `x - (y + 0.5)`, which rounds differently.
    """
    if tf.executing_eagerly():
        return tf.constant(value)
    return tf.raw_ops.PlaceholderWithDefault(input=tf.constant(value), shape=[])


def are_numbers(minimum: Scalar, maximum: Scalar) -> bool:
    return isinstance(minimum, float) and isinstance(maximum, float)


def fake_quantize(
    x: tf.Tensor, minimum: Scalar, maximum: Scalar, bits: int, narrow_range: bool, is_relu: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes on any device the same values as `fake_quant_with_min_max_vars` on a CPU.

    Args:
        x: the tensor, float32.
        minimum, maximum: the range. With the Python number 0 as `minimum`, the function is faster.
        bits, narrow_range: as in `QuantSpec`.
        is_relu: True to compute a ReLU of `x` as well. `minimum` must then be the number 0.

    Returns:
        The quantized values, and a mask for the gradient. The mask is true for elements in the
        range, widened by a millionth. With `is_relu`, it is false for zeros and tiny elements.
    """
    levels = float(2**bits - 1 - narrow_range)
    minimum, maximum = (
        end if isinstance(end, float) else tf.cast(end, tf.float32) for end in (minimum, maximum)
    )
    if isinstance(minimum, float) and minimum == 0.0:
        is_number = isinstance(maximum, float)
        scale = float(np.float32(maximum / levels)) if is_number else quotient(maximum, levels)
        steps = _divide(x, scale, 1.0)
        return _round(steps, levels) * scale, _is_inside(steps, levels, is_relu)
    minus, below = _find_minus_scale_and_zero_point(minimum, maximum, levels, narrow_range)
    steps = _divide(below * minus - x, minus, -1.0)
    clipped = tf.minimum(tf.maximum(steps, levels * (1.0 - BEYOND)), levels * BEYOND)
    inside = tf.equal(clipped, steps)
    if are_numbers(minus, below):  # Equals `below - clipped - 0.5`.
        half_below = below - 0.5 if below != 1.0 else 0.5 - 2.0**-25
        return tf.math.ceil(half_below - clipped) * minus, inside
    return tf.math.ceil(below - clipped - hide_constant(0.5)) * minus, inside


def _is_inside(steps: tf.Tensor, levels: float, is_relu: bool) -> tf.Tensor:
    """Compute `0 <= steps <= levels`. For a ReLU, compute `0 < steps <= levels`.

    Two operations suffice: `squared_difference(steps, levels / 2) < limit`.
    """
    middle = np.float32(levels * (BEYOND if is_relu else 1.0) / 2.0)
    farthest = middle if is_relu else np.float32(middle * (2.0 * BEYOND - 1.0))
    return tf.math.squared_difference(steps, middle) < farthest * farthest


def zero_unless(inside: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    # TensorFlow's layout optimizer for GPUs fails on a scalar zero.
    zeros = tf.zeros([1] * (inside.shape.rank or 0), x.dtype)
    return tf.where(inside, x, zeros)


def _divide(x: tf.Tensor, scale: Scalar, sign: float) -> tf.Tensor:
    """Compute `x / scale` like `quotient`, but faster on GPUs. `sign` is the sign of the scale.

    On GPUs, `quotient` of images is slow because TensorFlow transposes them.
    """
    if is_in_xla():
        return quotient(x, scale)
    if isinstance(scale, float):
        return tf.raw_ops.RealDiv(x=x, y=hide_constant(scale or sign * TINY))
    away_from_zero = tf.maximum if sign > 0 else tf.minimum
    return tf.raw_ops.RealDiv(x=x, y=away_from_zero(scale, sign * TINY))


def _find_minus_scale_and_zero_point(
    minimum: Scalar, maximum: Scalar, levels: float, narrow_range: bool
) -> tuple[Scalar, Scalar]:
    """Return `(-scale, zero_point)` of a range. They are floats if the range consists of floats.

    The zero point is the number of steps below zero.
    """
    if are_numbers(minimum, maximum):
        with tf.init_scope():
            ends = tf.constant(minimum), tf.constant(maximum)
            minus, below = _find_minus_scale_and_zero_point(*ends, levels, narrow_range)
            return float(minus), float(below)
    minus = quotient(minimum - maximum, levels)
    below = quotient(minimum, minus)
    if narrow_range:  # TensorFlow adds the lowest quantized value, which is 1, and rounds the sum.
        return minus, _round(below + 1.0, levels + 1.0) - 1.0
    return minus, _round(below, levels)


def _round(steps: tf.Tensor, levels: float) -> tf.Tensor:
    """Round to integers from 0 to `levels`, with halves up, in one operation.

    The operation is fake quantization with a scale of 1, which is exact even if it is fused.
    """
    bits = math.ceil(math.log2(levels + 1.0))
    return tf.raw_ops.FakeQuantWithMinMaxArgs(
        inputs=steps, min=0.0, max=levels, num_bits=bits, narrow_range=levels < 2.0**bits - 1.0
    )


def nudged_range(
    minimum: Scalar, maximum: Scalar, bits: Scalar = 8, narrow_range: bool | Scalar = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the nudged range of fake quantization: shifted slightly to make zero a level."""
    lowest = narrow_range if tf.is_tensor(narrow_range) else float(narrow_range)
    highest = 2.0**bits - 1.0
    scale = quotient(maximum - minimum, highest - lowest)
    # If all values are 0, as after a BatchNormalization with gamma 0, the scale is 0.
    zero_point = tf.floor(lowest - quotient(minimum, scale) + 0.5)
    zero_point = tf.clip_by_value(zero_point, lowest, highest)
    return (lowest - zero_point) * scale, (highest - zero_point) * scale
