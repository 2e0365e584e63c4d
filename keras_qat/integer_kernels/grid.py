"""Codes of 8 or 16 bits as the quantization-aware model computes with them at inference.

A tensor is counted in steps: whole numbers, zero being the real zero. A tensor of the model can
carry them along, so that the next layer need not compute them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.branching import traced_once

__all__ = ["Grid", "carry_steps", "kept", "ratio_of", "round_away", "single", "steps_of"]


class Grid(NamedTuple):
    """The steps of a tensor. Scalar tensors, float64.

    `scale`: the real value of one step, a float32 number, as files hold it. `lowest`, `highest`:
    the steps at the ends of the range. `lowest_code`: the code of the first of them.
    """

    scale: Any
    lowest: Any
    highest: Any
    lowest_code: float

    @classmethod
    def of(cls, minimum: Any, maximum: Any, bits: int) -> Grid:
        """That of a range, as TFLite's converter makes it; of an empty range, steps of 1.

        It is told the nudged ends in float32 and divides in double precision. With 16 bits, ranges
        are symmetric, and zero is code 0.
        """
        known = [tf.get_static_value(each) for each in (minimum, maximum)]
        if any(each is None for each in known):
            scale, lowest, highest = _grid(minimum, maximum, bits)
        else:  # A fixed range. TensorFlow would try to fold the function away, and complain.
            with tf.init_scope():
                numbers = [float(each) for each in _grid(*known, bits)]
            scale, lowest, highest = (tf.constant(each, tf.float64) for each in numbers)
        return cls(scale, lowest, highest, -(2.0 ** (bits - 1)))

    @property
    def zero_point(self) -> Any:
        """The code of zero."""
        return self.lowest_code - self.lowest

    def clip(self, steps: Any, ceiling: float | None = None) -> Any:
        """Steps inside the range; with a `ceiling`, a real number, those of a ReLU that ends there.

        Infinity: one that does not end.
        """
        lowest, highest = self.lowest, self.highest
        if ceiling is not None:
            lowest = tf.maximum(lowest, 0.0)
            highest = tf.minimum(highest, round_away(ceiling / self.scale))
        ends = (tf.cast(each, steps.dtype) for each in (lowest, highest))
        return tf.raw_ops.ClipByValue(t=steps, clip_value_min=next(ends), clip_value_max=next(ends))


@traced_once
def _grid(minimum: Any, maximum: Any, bits: int) -> tuple[Any, Any, Any]:
    levels = 2.0**bits - 1
    low, high = (tf.cast(each, tf.float64) for each in (minimum, maximum))
    step = (high - low) / levels
    step = tf.where(step > 0, step, tf.ones_like(step))
    if bits == 16:
        zero = tf.constant(2.0 ** (bits - 1), tf.float64)
    else:
        zero = tf.clip_by_value(tf.round(-low / step), 0.0, levels)
        step = (single((levels - zero) * step) - single(-zero * step)) / levels
    return single(step), -zero, levels - zero


def single(number: Any) -> Any:
    """A float64 number, rounded to float32: that of a computation in float32."""
    return tf.cast(tf.cast(number, tf.float32), tf.float64)


def ratio_of(first: Any, *others: Any, over: Any) -> Any:
    """A product of scales over another one, each operation rounded to float32."""
    for each in others:
        first = single(first * each)
    return single(first / over)


def round_away(x: Any) -> Any:
    """To whole numbers, halves away from zero."""
    return tf.sign(x) * tf.floor(tf.abs(x) + 0.5)


def kept(quantizer: Any, grid_of: Callable[[Any], Grid], keep: bool) -> Grid:
    """`grid_of(quantizer)`, computed once in each graph if `keep`."""
    if not keep or tf.executing_eagerly():
        return grid_of(quantizer)
    graph = tf.compat.v1.get_default_graph()
    grids = getattr(graph, "_keras_qat_grids", {})
    graph._keras_qat_grids = grids
    if quantizer not in grids:
        grids[quantizer] = grid_of(quantizer)
    return grids[quantizer]


def carry_steps(x: Any, steps: Any, quantizer: Any) -> None:
    """Makes a tensor of a graph carry its steps on the grid of its quantizer."""
    if not tf.executing_eagerly():  # There the quantizer's range could change in between.
        x._keras_qat_steps = steps, quantizer


def steps_of(x: Any, quantizer: Any, grid: Grid, dtype: Any) -> Any:
    """The steps of a tensor whose values lie on the grid of a quantizer."""
    steps, owner = getattr(x, "_keras_qat_steps", (None, None))
    if owner is quantizer:
        return tf.cast(steps, dtype)
    return tf.round(tf.cast(x, dtype) * tf.cast(1 / grid.scale, dtype))
