"""Which numbers pass the gradient of a quantizer on a CPU: those within its range.

One operation looks at each number once. XLA has none such, and a GPU would wait for ends that it
has computed itself, as that operation takes them from the host's memory: there quantizers keep
which numbers of steps are in the range (`plain_operations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.plain_operations import BEYOND, TINY, are_numbers, nudged_range
from keras_qat.arithmetic.together import SharedFunction

Mask = Callable[[Any, Any], Any]
"""Function of the upstream gradient and a tensor, which returns the gradient or zeros."""


class Gates:
    """What the gradients of quantizers need of their ranges, computed for all of them at once.

    Attributes:
        below, between: the functions of these names.
    """

    def __init__(self) -> None:
        self.below = SharedFunction(find_relu_end)
        self.between = SharedFunction(find_range_ends)


def mask_of_range(
    minimum: Any, maximum: Any, bits: int, narrow_range: bool, gates: Gates, on: Any = True
) -> Mask:
    """Returns the mask of numbers in a range, which is nudged.

    Args:
        minimum, maximum: float numbers or scalar tensors.
        bits, narrow_range: as in `QuantSpec`.
        gates: those that it shares with other quantizers.
        on: True, or a scalar tensor; where that is false, all numbers pass.
    """
    nudging = minimum, maximum, float(bits), float(narrow_range)
    if not are_numbers(minimum, maximum):
        ends = gates.between.later(*nudging, on)
        return lambda upstream, x: _inside(upstream, x, *ends())
    return lambda upstream, x: _inside(upstream, x, *find_range_ends(*nudging, on))


def mask_of_relu(maximum: Any, ceiling: float, gates: Gates, on: Any = True) -> Mask:
    """Returns the mask of numbers above zero and up to `maximum`, but below the `ceiling`.

    Args:
        maximum: upper end of the range of a ReLU: a float number or a scalar tensor.
        ceiling: upper end of the ReLU.
        gates: those that it shares with other quantizers.
        on: True, or a scalar tensor; where that is false, all numbers below the ceiling pass.
    """
    ends = maximum, _before(ceiling), on
    gate = partial(find_relu_end, *ends) if isinstance(maximum, float) else gates.below.later(*ends)
    return lambda upstream, x: _inside(upstream, x, *gate())


def zero_outside_range(
    gradient: Any, x: Any, minimum: Any, maximum: Any, bits: int, narrow_range: bool
) -> Any:
    """Returns a gradient where `x` is in a range, else zero, as `mask_of_range` does at once.

    The operation that rounds clips infinity to the ends, which are the same to the last bit.
    """
    ends = tf.quantization.fake_quant_with_min_max_vars(
        [math.inf, -math.inf], minimum, maximum, bits, narrow_range
    )
    return _inside(gradient, x, *tf.unstack(ends * BEYOND))


def apply_mask(mask: Mask, upstream: Any, x: Any) -> Any:
    """Applies a mask in float32, and returns the gradient in the type of `upstream`."""
    if x.dtype != tf.float32:
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


def _before(ceiling: float) -> float:
    """Returns the float32 number before the upper end of a ReLU, which has no gradient there."""
    return float(np.nextafter(np.float32(ceiling), np.float32(0)))


def find_relu_end(high: Any, last: Any, on: Any = True) -> tuple[Any]:
    """Returns the upper end of what passes the gradient of a range from zero, behind a ReLU.

    Args:
        high: upper end of the range, which is inside, as is a millionth beyond.
        last: the last number before the upper end of the ReLU.
        on: whether the range counts; else only the ReLU does.
    """
    least = min if isinstance(high, float) else tf.minimum
    end = least(high * BEYOND, last)
    return (end if on is True else tf.where(on, end, last),)


def find_range_ends(
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
