"""The bias that a wrapper has once its BatchNormalization is folded, and how runtimes round it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat import backend, fake_quant
from keras_qat.branching import cond
from keras_qat.layers.scheduled import Phase

__all__ = ["add_rounding", "factor_and_bias", "least_weight_step", "normalization", "rounded_bias"]

_layers = backend.keras.layers

BIAS_MAX = 2.0**30
"""Largest code of a bias: half of what 32 bits hold, the rest is for the sum it is added to."""


def factor_and_bias(wrapper: Any, dtype: Any = tf.float32) -> tuple[Any, Any]:
    """What a wrapper at inference multiplies its kernel by and adds, per output channel.

    BatchNorm(conv(x, W) + b) = conv(x, a W) + a (b - mean) + beta, per channel, with
    a = gamma / sqrt(variance + epsilon).

    Args:
        wrapper: the wrapper.
        dtype: what is computed with, and returned.

    Returns:
        The factor and the bias, each a vector or None. An affine layer (`kernels.AFFINE`) has no
        kernel: its factor stands for one.
    """
    layer, norm = wrapper.layer, wrapper.batch_norm
    factor, bias = None, getattr(layer, "bias", None)
    bias = None if bias is None else tf.cast(bias, dtype)
    if not wrapper.weight_axes:
        channels = wrapper.channels
        if isinstance(layer, _layers.Normalization):
            mean, variance = (
                tf.reshape(tf.cast(each, dtype), [-1]) for each in (layer.mean, layer.variance)
            )
            deviation = tf.maximum(tf.sqrt(variance), backend.keras.backend.epsilon())
            factor, bias = (deviation, mean) if layer.invert else (1 / deviation, -mean / deviation)
        elif isinstance(layer, _layers.Rescaling):
            factor, bias = (
                tf.cast(np.asarray(each, np.float32), dtype) for each in (layer.scale, layer.offset)
            )
        elif isinstance(layer, _layers.BatchNormalization):
            norm = layer
        else:  # ConvNeXt's LayerScale.
            factor = tf.cast(layer.gamma, dtype)
            bias = tf.zeros_like(factor)
        if norm is None:
            return tf.broadcast_to(factor, [channels]), tf.broadcast_to(bias, [channels])
    return (factor, bias) if norm is None else normalization(bias, norm, dtype)


def normalization(bias: Any, norm: Any, dtype: Any = tf.float32) -> tuple[Any, Any]:
    """The factor of a BatchNormalization at inference, and the bias in front of it folded in."""
    factor = tf.math.rsqrt(tf.cast(norm.moving_variance, dtype) + norm.epsilon)
    if norm.scale:
        factor *= tf.cast(norm.gamma, dtype)
    bias = (0.0 if bias is None else bias) - tf.cast(norm.moving_mean, dtype)
    bias *= factor
    if norm.center:
        bias += tf.cast(norm.beta, dtype)
    return factor, bias


def least_weight_step(wrapper: Any, bias: Any) -> Any:
    """The smallest step of each channel's weights with which its bias fits 32 bits.

    Next to nothing is left of a channel's weights where training switched it off, but its bias
    stays. In steps of such weights it would not fit; in these it does, and all products together
    are next to nothing against it.

    Returns:
        A vector, a scalar for weights with one range; 0 if the input's step is not known.
    """
    if bias is None or wrapper.input_quantizer is None or wrapper.fold != "per_channel":
        return tf.constant(0.0)
    least = tf.math.divide_no_nan(tf.abs(bias), _input_step(wrapper) * BIAS_MAX)
    return tf.reduce_max(least) if () in wrapper.weight_axes.values() else least


def _input_step(wrapper: Any) -> Any:
    minimum, maximum = wrapper.input_quantizer.observe(None, False)
    return (maximum - minimum) / (2**wrapper.input_quantizer.spec.bits - 1)


def rounded_bias(wrapper: Any) -> tuple[Any, Any]:
    """The folded bias, and the same in whole steps of input scale times weight scale.

    Runtimes hold it so, in 32 bits. Small as it is against a step of the output, this rounding is
    the main cause of codes that differ: in 1 of 1000 behind a depthwise convolution, and the
    layers behind that multiply them. Both None without a bias; equal if a scale is not known.
    """
    factor, bias = factor_and_bias(wrapper)
    quantizer = wrapper.input_quantizer
    if bias is None or quantizer is None or wrapper.fold != "per_channel":
        return bias, bias
    if wrapper.weight_axes:
        ((name, axes),) = wrapper.weight_axes.items()
        if name not in wrapper.weight_quantizers:
            return bias, bias
        kernel = tf.convert_to_tensor(getattr(wrapper.layer, name))
        limits = tf.reshape(fake_quant.channel_limits(kernel, axes), [-1])
        levels = 2 ** (wrapper.weight_spec.bits - 1) - 1
        if factor is not None:
            limits *= tf.where(factor == 0.0, tf.ones_like(factor), tf.abs(factor))
    else:
        limits, levels = tf.where(factor == 0.0, tf.ones_like(factor), tf.abs(factor)), 127
    step = tf.maximum(limits / levels, least_weight_step(wrapper, bias)) * _input_step(wrapper)
    safe = tf.where(step > 0, step, tf.ones_like(step))
    return bias, tf.where(step > 0, tf.round(bias / safe) * step, bias)


def add_rounding(wrapper: Any, x: Any, phase: Phase) -> Any:
    """A layer's result, at inference with its bias rounded.

    Training goes without: there it would cost time and change next to nothing.
    """
    if phase.training is True or wrapper.input_quantizer is None:
        return x

    def difference() -> Any:
        exact, rounded = rounded_bias(wrapper)
        return tf.zeros([1]) if exact is None else rounded - exact

    applies = phase.quantizing
    if phase.training is not False:
        applies = tf.logical_and(applies, tf.logical_not(phase.training))
    added = cond(applies, difference, lambda: tf.zeros_like(difference()))
    if getattr(wrapper.layer, "data_format", None) == "channels_first":
        added = tf.reshape(added, [-1] + [1] * (len(wrapper.layer.kernel_size)))
    return x + added
