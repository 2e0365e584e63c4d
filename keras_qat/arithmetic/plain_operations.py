"""Operations that round in the same way on every device, in a graph and outside of one.

TensorFlow's graph optimization replaces `1 / x` by an approximate `Reciprocal` and a division by a
constant by a multiplication, and it reorders chains of products. XLA and GPU kernels fuse a product
with a sum that follows it, and round only once. Each of these changes last bits, and so quantized
values. The functions here use operations that none of them rewrites.
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
"""Factor that moves the ends of a range outside, because a nudged end may be one bit too small."""


def is_in_xla() -> bool:
    """Whether XLA compiles the graph that is being traced, as with `jit_compile=True`."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph)


def has_gpu() -> bool:
    """Whether operations may run on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))


def must_not_fuse() -> bool:
    """Whether XLA or a GPU kernel may fuse a product with a sum. They do not fuse `product`."""
    return is_in_xla() or has_gpu()


def product(x: Scalar, y: tf.Tensor) -> tf.Tensor:
    """Computes x * y, 0 if y is 0."""
    x = tf.convert_to_tensor(x, dtype=getattr(y, "dtype", None))
    if x.dtype == tf.float32 and is_in_xla():
        # XLA would fuse it with a sum. The product is exact in float64, and then rounded.
        return tf.cast(tf.cast(x, tf.float64) * tf.cast(y, tf.float64), tf.float32)
    return tf.raw_ops.MulNoNan(x=x, y=y)


def quotient(x: Scalar, y: Scalar) -> tf.Tensor:
    """Computes x / y, 0 if y is 0."""
    x = tf.convert_to_tensor(x, dtype=getattr(y, "dtype", None))
    y = tf.cast(y, x.dtype)
    if x.dtype == tf.float32 and is_in_xla():
        # XLA multiplies by 1 / y if y is constant, and a fourth of its quotients on GPUs are one
        # bit off. A product with 1 / y in float64 rounds to the same float32 number as x / y,
        # because x / y is at least 2^-49 away from the middle between two of them.
        wide = tf.math.divide_no_nan(tf.ones([], tf.float64), tf.cast(y, tf.float64))
        return tf.cast(tf.raw_ops.MulNoNan(x=tf.cast(x, tf.float64), y=wide), x.dtype)
    return tf.raw_ops.DivNoNan(x=x, y=y)


def gather(table: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Returns the entries of a table of one axis, in two thirds of the time of `tf.gather`."""
    return tf.gather_nd(table, positions[..., tf.newaxis])


def hide_constant(value: float) -> tf.Tensor:
    """Returns a float32 constant that graph optimization does not recognize as one.

    Otherwise `(x - y) - 0.5` would become `x - (y + 0.5)`, which rounds differently.
    """
    if tf.executing_eagerly():
        return tf.constant(value)
    return tf.raw_ops.PlaceholderWithDefault(input=tf.constant(value), shape=[])


def are_numbers(minimum: Scalar, maximum: Scalar) -> bool:
    """Whether the ends of a range are numbers, known while a graph is traced."""
    return isinstance(minimum, float) and isinstance(maximum, float)


def fake_quantize(
    x: tf.Tensor, minimum: Scalar, maximum: Scalar, bits: int, narrow_range: bool, is_relu: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes `fake_quant_with_min_max_vars` in the order of operations of its CPU kernel.

    Unlike the kernel, it divides before it clips, which changes no value but makes the ends of the
    range known numbers of steps.

    Args:
        x: the tensor, float32.
        minimum, maximum: the range. A `minimum` that is the number 0 saves half of the operations.
        bits, narrow_range: as in `QuantSpec`.
        is_relu: whether to compute a ReLU of `x` as well; `minimum` must then be the number 0.

    Returns:
        The tensor, rounded to the levels of the range, and a mask of the elements that pass the
        gradient. These are the elements in the range, including a millionth of its width beyond
        the ends, but without the zeros of a ReLU: all elements below 2^-26 of the range.
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
    if are_numbers(minus, below):  # This equals two differences, except for one number of steps.
        half_below = below - 0.5 if below != 1.0 else 0.5 - 2.0**-25
        return tf.math.ceil(half_below - clipped) * minus, inside
    return tf.math.ceil(below - clipped - hide_constant(0.5)) * minus, inside


def _is_inside(steps: tf.Tensor, levels: float, is_relu: bool) -> tf.Tensor:
    """Return which elements are from 0 to `levels`, or above 0 for a ReLU.

    It compares the distance to the middle, with two operations instead of three.
    """
    middle = np.float32(levels * (BEYOND if is_relu else 1.0) / 2.0)
    farthest = middle if is_relu else np.float32(middle * (2.0 * BEYOND - 1.0))
    return tf.math.squared_difference(steps, middle) < farthest * farthest


def zero_unless(inside: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    # TensorFlow's layout optimizer for GPUs fails on a scalar zero.
    zeros = tf.zeros([1] * (inside.shape.rank or 0), x.dtype)
    return tf.where(inside, x, zeros)


def _divide(x: tf.Tensor, scale: Scalar, sign: float) -> tf.Tensor:
    """Compute x / scale, for a scale with this sign. If the range is empty, zero is zero steps.

    On a GPU, TensorFlow swaps the axes of images, and swaps them back before operations that may
    depend on their order, such as the operation in `quotient`.
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
    """Return the negated scale of a range, which saves an operation, and its zero point.

    Both are numbers if the range is. The zero point is the number of steps below zero.
    """
    if are_numbers(minimum, maximum):
        with tf.init_scope():
            ends = tf.constant(minimum), tf.constant(maximum)
            minus, below = _find_minus_scale_and_zero_point(*ends, levels, narrow_range)
            return float(minus), float(below)
    minus = quotient(minimum - maximum, levels)
    below = quotient(minimum, minus)
    if narrow_range:  # TensorFlow rounds this sum, which includes the lowest quantized value, 1.
        return minus, _round(below + 1.0, levels + 1.0) - 1.0
    return minus, _round(below, levels)


def _round(steps: tf.Tensor, levels: float) -> tf.Tensor:
    """Round halves up to integers from 0 to `levels`, with one operation.

    It is TensorFlow's fake quantization for constant ranges. With steps of 1 from zero, its
    products and its sums with zero are exact, however they are fused.
    """
    bits = math.ceil(math.log2(levels + 1.0))
    return tf.raw_ops.FakeQuantWithMinMaxArgs(
        inputs=steps, min=0.0, max=levels, num_bits=bits, narrow_range=levels < 2.0**bits - 1.0
    )


def nudged_range(
    minimum: Scalar, maximum: Scalar, bits: Scalar = 8, narrow_range: bool | Scalar = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the range to which fake quantization clips: zero and both ends are levels.

    The order of operations is the same as in TensorFlow's kernel, so all bits are equal.
    """
    lowest = narrow_range if tf.is_tensor(narrow_range) else float(narrow_range)
    highest = 2.0**bits - 1.0
    scale = quotient(maximum - minimum, highest - lowest)
    # The scale of zeros, as after a BatchNormalization that starts with gamma = 0, is 0.
    zero_point = tf.floor(lowest - quotient(minimum, scale) + 0.5)
    zero_point = tf.clip_by_value(zero_point, lowest, highest)
    return (lowest - zero_point) * scale, (highest - zero_point) * scale
