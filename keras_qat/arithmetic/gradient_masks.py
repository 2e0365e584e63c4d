"""Which numbers pass the gradient of a quantizer: those within its range.

A CPU looks at each number once. XLA has no such operation, and a GPU would wait for ends that it
has computed itself, as that operation takes them from the host's memory: there others look.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import as_written
from keras_qat.arithmetic.as_written import in_xla, must_not_fuse, quotient
from keras_qat.arithmetic.plain_operations import TINY, are_numbers, nudged_range
from keras_qat.arithmetic.together import Together

BEYOND = 1 + 2.0**-20
"""Ends of a range times this are outside. A nudged end may be a last bit inside of the data's."""

Mask = Callable[[Any, Any], Any]
"""Function of the upstream gradient and a tensor, which returns the gradient or zeros."""


class Gates:
    """What the gradients of quantizers need of their ranges, computed for all of them at once.

    Attributes:
        below, to_six, between: the functions of these names.
    """

    def __init__(self) -> None:
        self.below = Together(below)
        self.to_six = Together(to_six)
        self.between = Together(between)


def mask_of_range(
    minimum: Any, maximum: Any, bits: int, narrow_range: bool, gates: Gates, on: Any = True
) -> Mask:
    """Returns the mask of numbers in a range, which is nudged.

    Args:
        minimum, maximum: float numbers or scalar tensors.
        bits, narrow_range: as in `QuantSpec`.
        gates: those that it shares with other quantizers.
        on: True, or on CPUs a scalar tensor; where that is false, all numbers pass.
    """
    nudging = minimum, maximum, float(bits), float(narrow_range)
    if not are_numbers(minimum, maximum):
        ends = gates.between.later(*nudging, on)
        inside = _inside_plainly if must_not_fuse() else _inside
        return lambda upstream, x: inside(upstream, x, *ends())
    if not must_not_fuse():
        return lambda upstream, x: _inside(upstream, x, *between(*nudging, on))
    with tf.init_scope():
        high, low = (float(end) for end in between(*nudging))
    gradient = partial(
        tf.raw_ops.FakeQuantWithMinMaxArgsGradient,
        min=low,
        max=high,
        num_bits=bits,
        narrow_range=narrow_range,
    )
    return lambda upstream, x: gradient(gradients=upstream, inputs=x)


def mask_of_relu(maximum: Any, ceiling: float, gates: Gates, on: Any = True) -> Mask:
    """Returns the mask of numbers above zero and up to `maximum`, but below the `ceiling`.

    Args:
        maximum: upper end of the range of a ReLU: a float number or a scalar tensor.
        ceiling: upper end of the ReLU.
        gates: those that it shares with other quantizers.
        on: True, or on CPUs a scalar tensor; where that is false, all numbers below the ceiling
            pass.
    """
    is_plain = must_not_fuse()
    function = to_six if is_plain else below
    together = gates.to_six if is_plain else gates.below
    ends = (maximum, ceiling) if is_plain else (maximum, _before(ceiling), on)
    is_number = isinstance(maximum, float)
    gate = partial(function, *ends) if is_number else together.later(*ends)
    inside = _inside_relu if is_plain else _inside
    return lambda upstream, x: inside(upstream, x, *gate())


def masks_steps(x: Any, bits: int) -> bool:
    """Whether a quantizer had better keep numbers of steps for `mask_of_steps` than `x`.

    GPUs save two operations. XLA joins operations, and sees exactly which numbers are in the range.
    """
    return as_written.has_gpu() and not in_xla() and bits <= 8 and x.dtype == tf.float32


def mask_of_steps(levels: int) -> Mask:
    """Returns the mask of numbers from 0 to `levels`, and a little beyond both ends.

    With 8 bits that is a 257th, with fewer less.
    """
    beyond = levels / (2.0**16 - 3.0)  # One of 65535 steps at each end.
    to_six = 6.0 / (levels + 2.0 * beyond)
    return lambda upstream, x: _inside_relu(upstream, x + beyond, to_six)


def masked(mask: Mask, upstream: Any, x: Any) -> Any:
    """Applies a mask in float32, and returns the gradient in the type of `upstream`."""
    if must_not_fuse() or x.dtype != tf.float32:
        with tf.control_dependencies([upstream]):  # Going forward it would be kept until here.
            x = tf.identity(x)
    gradient = mask(tf.cast(upstream, tf.float32), tf.cast(x, tf.float32))
    return tf.cast(gradient, upstream.dtype)


def _inside(upstream: Any, x: Any, high: Any, low: Any = TINY) -> Any:
    """Returns `upstream` where `x` is from `low` to `high`, else zero.

    By the gradient of another operation that rounds, in one pass; a mask takes four: two
    comparisons, what both say, and the choice.
    """
    low, high = (tf.cast(end, tf.float32) for end in (low, high))
    return tf.raw_ops.QuantizeAndDequantizeV4Grad(
        gradients=upstream, input=x, input_min=low, input_max=high
    )[0]


def _inside_plainly(upstream: Any, x: Any, high: Any, low: Any) -> Any:
    """Computes `_inside` by operations that XLA and GPUs have."""
    low, high = (tf.cast(end, tf.float32) for end in (low, high))
    clipped = tf.raw_ops.ClipByValue(t=x, clip_value_min=low, clip_value_max=high)
    # Of a single zero in place of these, TensorFlow's layout optimizer for GPUs makes an error.
    return tf.where(tf.equal(clipped, x), upstream, tf.zeros_like(upstream))


def _inside_relu(upstream: Any, x: Any, to_six: Any) -> Any:
    """Returns `upstream` where `x` times `to_six` is above zero and below six, else zero."""
    if not (isinstance(to_six, float) and to_six == 1.0):
        x *= tf.cast(to_six, x.dtype)
    return tf.raw_ops.Relu6Grad(gradients=upstream, features=x)


def _before(ceiling: float) -> float:
    """Returns the float32 number before the upper end of a ReLU, which has no gradient there."""
    return float(np.nextafter(np.float32(ceiling), np.float32(0)))


def below(high: Any, last: Any, on: Any = True) -> tuple[Any]:
    """Returns the upper end of what passes the gradient of a range from zero, behind a ReLU.

    Args:
        high: upper end of the range, which is inside, as is a millionth beyond.
        last: the last number before the upper end of the ReLU.
        on: whether the range counts; else only the ReLU does.
    """
    least = min if isinstance(high, float) else tf.minimum
    end = least(high * BEYOND, last)
    return (end if on is True else tf.where(on, end, last),)


def to_six(high: Any, ceiling: Any) -> tuple[Any]:
    """Returns what moves the end that numbers have to be below to 6: a ReLU6's has a kernel.

    Args:
        high: as in `below`.
        ceiling: the upper end of the ReLU.
    """
    (end,) = below(high, ceiling)
    return (6.0 / end if isinstance(end, float) else quotient(6.0, end),)


def between(
    minimum: Any, maximum: Any, bits: Any, narrow_range: Any, on: Any = True
) -> tuple[Any, Any]:
    """Returns the upper and the lower end of what passes the gradient of a range.

    It is the nudged range from `minimum` to `maximum`, and a millionth beyond both ends; infinity
    where the range is not `on`.
    """
    low, high = nudged_range(minimum, maximum, bits, narrow_range)
    ends = high * BEYOND, low * BEYOND
    if on is True:
        return ends
    return tf.where(on, ends[0], math.inf), tf.where(on, ends[1], -math.inf)
