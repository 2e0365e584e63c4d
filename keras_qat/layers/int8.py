"""Layers with an int8 kernel: their weights as files hold them, and what XNNPACK computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat import backend, fake_quant
from keras_qat.backend import keras
from keras_qat.fixed_point import fixed_point, multiply
from keras_qat.grid import Grid, ratio_of, round_away, single
from keras_qat.layers import bias as bias_lib

__all__ = ["INT8_MAX", "Weights", "computed", "folded", "has_codes", "weights"]

INT8_MAX = 127
"""Largest code of a weight in TFLite, which leaves out -128."""

BIAS_MAX = 2.0**30
"""Largest code of a bias: half of what 32 bits hold, the rest is for the sum it is added to."""

TRANSPOSED = (keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose)


class Weights(NamedTuple):
    """A layer's weights, BatchNormalization folded, float64.

    `codes` times `steps` is the kernel (`steps` is shaped to broadcast). `bias`: one number for
    each output channel, whole steps of the products if the input's step is known; or None.
    """

    codes: Any
    steps: Any
    bias: Any


def has_codes(wrapper: Any) -> bool:
    """Whether a wrapper's weights have whole codes, with a step for each channel or for all."""
    has_weights = set(wrapper.weight_quantizers) == set(wrapper.weight_axes)
    return has_weights and wrapper.fold == "per_channel"


def folded(wrapper: Any) -> Weights:
    """The weights of a wrapper that `has_codes`, the bias as it is.

    Q(a W) = a Q(W): the codes are those of the kernel as it is, the steps are multiplied by |a|.
    With fewer than 8 bits, steps become a whole number of times finer, so that the bias, which
    files hold in steps of input times weight, is rounded less.
    """
    factor, bias = bias_lib.factor_and_bias(wrapper, tf.float64)
    if not wrapper.weight_axes:  # An affine layer: one number for each channel, always exact.
        return Weights(INT8_MAX * tf.sign(factor), _size(factor) / INT8_MAX, bias)
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = tf.convert_to_tensor(getattr(wrapper.layer, name))
    bits, rank = wrapper.weight_spec.bits, len(kernel.shape)
    limits = fake_quant.channel_limits(kernel, axes)
    values = fake_quant.fake_quantize_channels(kernel, limits, bits)
    limits, values = (tf.cast(each, tf.float64) for each in (limits, values))
    levels = 2 ** (bits - 1) - 1
    finer = INT8_MAX // levels
    codes, steps = tf.round(values * levels / limits) * finer, limits / (levels * finer)
    if factor is not None:
        shape = [kernel.shape[axis] if axis in axes else 1 for axis in range(-rank, 0)]
        factor = tf.reshape(factor, shape)
        codes, steps = codes * tf.sign(factor), steps * _size(factor)
    return Weights(codes, steps, bias)


def _size(factor: Any) -> Any:
    """Of a channel that BatchNormalization switches off, 1: its codes are zero."""
    return tf.where(factor == 0.0, tf.ones_like(factor), tf.abs(factor))


def weights(wrapper: Any) -> Weights:
    """The weights as files hold them, the bias rounded if the step of the input is known.

    Next to nothing is left of a channel's weights where training switched it off, but its bias
    stays. In steps of such weights it would not fit 32 bits; in the steps of this it does, and
    what they round is next to nothing against the bias.
    """
    codes, steps, bias = folded(wrapper)
    quantizer = wrapper.input_quantizer
    if bias is None or quantizer is None:
        return Weights(codes, steps, bias)
    minimum, maximum = quantizer.observe(None, training=False)
    input_step = Grid.of(minimum, maximum, quantizer.spec.bits).scale
    least = tf.abs(bias) / (input_step * BIAS_MAX)
    one_step = steps.shape.num_elements() == 1
    least = tf.reduce_max(least) if one_step else tf.reshape(least, steps.shape)
    codes = tf.where(steps < least, tf.round(codes * steps / tf.maximum(steps, least)), codes)
    steps = tf.maximum(steps, least)
    products = input_step * tf.reshape(steps, [-1])
    return Weights(codes, steps, tf.round(bias / products) * products)


def computed(wrapper: Any, x: Any, grid: Grid, output: Grid) -> Any:
    """A wrapper's result in steps of `output`, from the steps of its input: float32.

    Sums of products are exact below 2^24. XNNPACK's are 32-bit integers, which it turns into
    float32 to multiply them; halves become even.
    """
    codes, steps, bias = weights(wrapper)
    # The converter is given float32 numbers, and divides in double precision.
    scales = single(INT8_MAX * steps) / INT8_MAX
    codes = tf.cast(codes, tf.float32)
    scales = tf.reshape(scales, [-1])
    if bias is not None:
        bias = tf.cast(round_away(single(bias) / (grid.scale * scales)), tf.float32)
    if wrapper.weight_axes:
        (name,) = wrapper.weight_axes
        y = backend.call_with(wrapper.layer, x, name, codes, bias)
    else:
        y = x * codes + bias
    scales = single(scales)
    if isinstance(wrapper.layer, TRANSPOSED) and wrapper.any_batch:
        return _in_eights(y, grid.scale * scales / output.scale)
    ratio = ratio_of(grid.scale, scales, over=output.scale)
    return tf.round(y * tf.cast(ratio, tf.float32))


def _in_eights(sums: Any, ratio: Any) -> Any:
    """Transposed convolutions of any number of images, which XNNPACK does not take.

    TFLite's optimized kernel computes eight channels at a time, which round halves up at the end,
    and those that are left as the reference kernel does: away from zero.
    """
    sums = tf.cast(sums, tf.int64)
    channels = sums.shape[-1]
    in_eights = tf.range(channels) < channels // 8 * 8
    number = fixed_point(ratio)
    up, away = (multiply(sums, number, halves_up=each) for each in (True, False))
    return tf.cast(tf.where(in_eights, up, away), tf.float32)
