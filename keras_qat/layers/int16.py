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

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat import backend, fake_quant
from keras_qat.branching import cond, straight_through
from keras_qat.fixed_point import exact_multiplier
from keras_qat.int16_kernels import saturated, step_of
from keras_qat.layers import bias as bias_lib
from keras_qat.layers.scheduled import Phase, infers
from keras_qat.patterns import is_known

__all__ = ["Weights", "at_inference", "computes_in_int16", "result", "rounded", "weights"]

INT8_MAX = 127
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


def computes_in_int16(wrapper: Any) -> bool:
    """Whether an int16 kernel computes a wrapper from one known range to another."""
    ends = wrapper.input_quantizer, wrapper.result_quantizer
    if any(each is None or each.spec.bits != 16 for each in ends):
        return False
    if getattr(wrapper.layer, "data_format", None) == "channels_first":
        return False
    has_weights = set(wrapper.weight_quantizers) == set(wrapper.weight_axes)
    return has_weights and wrapper.fold == "per_channel" and is_known(wrapper.layer)


def weights(wrapper: Any, input_step: Any, output_step: Any) -> Weights:
    """The weights, BatchNormalization folded, in steps with an exact multiplier.

    Args:
        wrapper: one that `computes_in_int16`.
        input_step, output_step: of its tensors.
    """
    factor, bias = bias_lib.factor_and_bias(wrapper, tf.float64)
    if wrapper.weight_axes:
        ((name, axes),) = wrapper.weight_axes.items()
        kernel = tf.convert_to_tensor(getattr(wrapper.layer, name))
        bits, rank = wrapper.weight_spec.bits, len(kernel.shape)
        levels = 2 ** (bits - 1) - 1
        limits = fake_quant.channel_limits(kernel, axes)
        values = fake_quant.fake_quantize_channels(kernel, limits, bits)
        limits, values = (tf.cast(each, tf.float64) for each in (limits, values))
        # As in an int8 file, which uses all codes.
        finer = INT8_MAX // levels
        codes, steps = tf.round(values * levels / limits) * finer, limits / (levels * finer)
        if factor is not None:
            shape = [kernel.shape[axis] if axis in axes else 1 for axis in range(-rank, 0)]
            codes, factor = codes * tf.reshape(tf.sign(factor), shape), tf.reshape(factor, shape)
            steps *= tf.where(factor == 0.0, tf.ones_like(factor), tf.abs(factor))
    else:  # An affine layer.
        codes = INT8_MAX * tf.sign(factor)
        steps = tf.where(factor == 0.0, tf.ones_like(factor), tf.abs(factor)) / INT8_MAX
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


def result(wrapper: Any, inputs: Any, x: Any, phase: Phase) -> Any:
    """A wrapper's result `x`, at inference as the kernel rounds it, with the gradient of `x`."""
    if not computes_in_int16(wrapper):
        return x

    def exact(input_step: Any, output_step: Any) -> Any:
        kernel = weights(wrapper, input_step, output_step)
        y = tf.round(tf.cast(inputs, tf.float64) / input_step)
        if wrapper.weight_axes:
            (name,) = wrapper.weight_axes
            y = backend.in_double(wrapper.layer, y, name, kernel.codes, kernel.bias)
        else:
            y = y * kernel.codes + kernel.bias
        # Whole numbers and their products with 15 bits: exact in float64, halves too.
        y = rounded(y * kernel.multipliers, 1.0) * output_step
        if wrapper.activation is not None:
            y = rounded(wrapper.activation.call(y), output_step)
        return y

    return at_inference([wrapper.input_quantizer, wrapper.result_quantizer], exact, x, phase)


def rounded(x: Any, step: Any) -> Any:
    """Real numbers in float64, rounded to whole steps of 16 bits, halves up."""
    return saturated(tf.floor(x / step + 0.5)) * step


def at_inference(quantizers: list[Any], exact: Callable[..., Any], x: Any, phase: Phase) -> Any:
    """`x`; at inference, with all of some quantizers in use, what a kernel gives in its place.

    Args:
        quantizers: those of the kernel's inputs, then of its output; 16 bits.
        exact: from their steps to the result.
        x: what training computes; the gradient is its.
        phase: that of the call.
    """
    if phase.training is True or phase.quantizing is False:
        return x
    ranges = [each.observe(None, training=False) for each in quantizers]

    def replaced() -> Any:
        y = tf.stop_gradient(exact(*(step_of(*limits) for limits in ranges)))
        return straight_through(lambda x: tf.ensure_shape(tf.cast(y, x.dtype), x.shape), x)

    return cond(infers(phase, quantizers, ranges), replaced, lambda: tf.identity(x))
