"""Layers with an int8 kernel: their weights as files hold them, and what XNNPACK computes."""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat import fake_quant
from keras_qat.arithmetic.fixed_point import fixed_point, multiply
from keras_qat.branching import traced_once
from keras_qat.integer_kernels.grid import Grid, ratio_of, round_away, single
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.layers import bias as bias_lib

__all__ = ["INT8_MAX", "Weights", "computed", "folded", "has_codes", "weights"]

INT8_MAX = 127
"""Largest code of a weight in TFLite, which leaves out -128."""

BIAS_MAX = 2.0**30
"""Largest code of a bias: half of what 32 bits hold, the rest is for the sum it is added to."""

LEAST_STEP = 5e-7 / INT8_MAX
"""Smallest step of a weight: the converter makes finer ones this wide."""

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
    rank = len(kernel.shape)
    channels = [kernel.shape[axis] if axis in axes else 1 for axis in range(-rank, 0)]
    factor = tf.ones([1], tf.float64) if factor is None else factor
    columns = tf.reshape(kernel, [-1, math.prod(channels)])
    codes, steps = _codes_and_steps(wrapper.weight_spec.bits)(columns, factor)
    return Weights(tf.reshape(codes, kernel.shape), tf.reshape(steps, channels), bias)


_VECTOR = tf.TensorSpec([None], tf.float64)
_SCALAR = tf.TensorSpec([], tf.float64)


@functools.cache
def _codes_and_steps(bits: int) -> Any:
    """From a kernel, a column for each channel, and a factor for each to codes and steps."""
    levels = 2 ** (bits - 1) - 1
    finer = INT8_MAX // levels

    @partial(traced_once, signature=[tf.TensorSpec([None, None]), _VECTOR])
    def found(kernel: Any, factor: Any) -> tuple[Any, Any]:
        limits = fake_quant.channel_limits(kernel, (-1,))
        values = fake_quant.fake_quantize_channels(kernel, limits, bits)
        limits, values = (tf.cast(each, tf.float64) for each in (limits, values))
        codes, steps = tf.round(values * levels / limits) * finer, limits / (levels * finer)
        return codes * tf.sign(factor), steps * _size(factor)

    return found


def _size(factor: Any) -> Any:
    """Of a channel that BatchNormalization switches off, 1: its codes are zero."""
    return tf.where(factor == 0.0, tf.ones_like(factor), tf.abs(factor))


def weights(wrapper: Any, input_step: Any) -> Weights:
    """The weights as files hold them, the bias rounded if the step of the input is known.

    In a file each call of a layer has a bias of its own, in steps of its input. `input_step` is
    the smallest of them, or None.

    Next to nothing is left of a channel's weights where training switched it off, but its bias
    stays. In steps of such weights it would not fit 32 bits; in the wider ones of this it does,
    and what they round is next to nothing against the bias.
    """
    codes, steps, bias = folded(wrapper)
    wider = tf.maximum(steps, LEAST_STEP)
    codes, steps = tf.round(codes * (steps / wider)), wider
    if bias is None or input_step is None:
        return Weights(codes, steps, bias)
    flat, shape = tf.reshape(bias, [-1]), steps.shape
    largest = tf.abs(flat)
    if shape.num_elements() == 1:
        largest = tf.reduce_max(largest, keepdims=True)
    narrower, steps, rounded = _fitting(tf.reshape(steps, [-1]), largest, flat, input_step)
    codes, steps = tf.round(codes * tf.reshape(narrower, shape)), tf.reshape(steps, shape)
    if wrapper.input_quantizer is None:
        return Weights(codes, steps, bias)
    return Weights(codes, steps, tf.reshape(rounded, bias.shape))


@partial(traced_once, signature=[_VECTOR, _VECTOR, _VECTOR, _SCALAR])
def _fitting(steps: Any, largest: Any, bias: Any, input_step: Any) -> tuple[Any, Any, Any]:
    """Steps with which a bias fits 32 bits, what they were before over that, and the bias."""
    wider = tf.maximum(steps, largest / (input_step * BIAS_MAX))
    products = input_step * wider
    return steps / wider, wider, tf.round(bias / products) * products


def computed(wrapper: Any, x: Any, grid: Grid, output: Grid, input_step: Any) -> Any:
    """A wrapper's result in steps of `output`, from the steps of its input: float32.

    `input_step`: the smallest step of its input in all of its calls.

    Sums of products are exact below 2^24. XNNPACK's are 32-bit integers, which it turns into
    float32 to multiply them; halves become even.
    """
    codes, steps, bias = weights(wrapper, input_step)
    codes = tf.cast(codes, tf.float32)
    whole, ratio, exact = _requantization(
        tf.reshape(steps, [-1]),
        tf.zeros([1], tf.float64) if bias is None else tf.reshape(bias, [-1]),
        grid.scale,
        output.scale,
    )
    if bias is not None:
        whole = tf.reshape(whole, bias.shape)
    if wrapper.weight_axes:
        (name,) = wrapper.weight_axes
        y = backend.call_with(wrapper.layer, x, name, codes, None if bias is None else whole)
    else:
        y = x * codes + whole
    if isinstance(wrapper.layer, TRANSPOSED) and wrapper.any_batch:
        return _in_eights(y, exact)
    return tf.round(y * ratio)


@partial(traced_once, signature=[_VECTOR, _VECTOR, _SCALAR, _SCALAR])
def _requantization(steps: Any, bias: Any, scale: Any, output: Any) -> tuple[Any, Any, Any]:
    """The bias in steps of the products, and those over the output's, as XNNPACK has them.

    Returns:
        Both in float32; the second one also in float64, without rounding.
    """
    # The converter is given float32 numbers, and divides in double precision.
    scales = single(INT8_MAX * steps) / INT8_MAX
    whole = round_away(single(bias) / (scale * scales))
    scales = single(scales)
    ratio = ratio_of(scale, scales, over=output)
    return tf.cast(whole, tf.float32), tf.cast(ratio, tf.float32), scale * scales / output


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
