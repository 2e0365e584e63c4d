"""Layers with a kernel between int16 tensors: what the file's kernel computes, exactly.

TFLite's int16 kernels add up products in 64 bits and multiply the sum by a number of 15 bits,
rounding once. Rounded to 15 bits the multiplier would be up to 0.003 % off: half a step at the end
of 65 536. So the steps of each channel's weights are made that little larger or smaller with
which their multiplier has 15 bits: then the kernel computes what the scales of its tensors say,
and so does whoever else reads the file.

At inference such layers compute in float64 what the kernel computes in integers. In float32, with
24 bits, one code in a hundred would be another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic.fixed_point import exact_multiplier
from keras_qat.integer_kernels.grid import Grid
from keras_qat.keras2 import backend
from keras_qat.layers import int8

__all__ = ["Weights", "computed", "weights"]

LEAST = 2.0**-23
"""Smallest multiplier. Where training switched a channel off but left its bias, it makes that fit
32 bits, as TFLite's converter asks even here, in steps 256 times as wide."""


class Weights(NamedTuple):
    """A layer's weights as its int16 kernel holds them, float64.

    `codes` times `steps` is the kernel (`steps` is shaped to broadcast). `bias`: whole steps
    of the products, one for each output channel; or None. `multipliers`: what the sums are
    multiplied by, one for each output channel or a single one.
    """

    codes: Any
    steps: Any
    bias: Any
    multipliers: Any


def weights(wrapper: Any, input_step: Any, output_step: Any) -> Weights:
    """The weights, BatchNormalization folded, in steps with an exact multiplier.

    Args:
        wrapper: one that has a kernel.
        input_step, output_step: of its tensors.
    """
    codes, steps, bias = int8.folded(wrapper)
    ratio = output_step / input_step
    least = LEAST * ratio
    codes = tf.where(steps < least, tf.round(codes * steps / least), codes)
    multipliers = exact_multiplier(tf.maximum(steps, least) / ratio)
    steps = multipliers * ratio
    multipliers = tf.reshape(multipliers, [-1])
    if bias is not None:
        per_channel = multipliers.shape[0] != 1
        bias = tf.round(
            bias / (output_step * tf.reshape(multipliers, bias.shape if per_channel else []))
        )
    return Weights(codes, steps, bias, multipliers)


def computed(wrapper: Any, x: Any, grid: Grid, output: Grid) -> Any:
    """A wrapper's result in steps of `output`, from the steps of its input: float64."""
    kernel = weights(wrapper, grid.scale, output.scale)
    if wrapper.weight_axes:
        (name,) = wrapper.weight_axes
        y = backend.call_with(wrapper.layer, x, name, kernel.codes, kernel.bias)
    else:
        y = x * kernel.codes + kernel.bias
    # Whole numbers and their products with 15 bits: exact in float64, halves too.
    return tf.floor(y * kernel.multipliers + 0.5)
