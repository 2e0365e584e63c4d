"""Weights with one scale for the tensor, quantized as the kernel holds them: folded.

BatchNormalization multiplies each output channel, so that the codes of one channel depend on the
factors of all. The folded kernel a W is quantized, with the factor a of the moving statistics, and
taken apart again: a convolution with Q(a W) / a, then Keras' own BatchNormalization.

A channel of a few codes only is quantized to something larger or smaller than it was. The batch's
statistics would hide that in training. So the convolution has a kernel of the size that W has, and
gamma is multiplied by what quantization changed it by, the channel's gain: what training computes
then is what the folded kernel gives, up to the batch's statistics. A channel of zeros alone has the
gain 0, as if gamma were: its statistics are those of the float kernel, so that it may come back.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.control_flow import cond, straight_through
from keras_qat.frontend.keras2 import backend
from keras_qat.training.batch_norm.factor_and_bias import factor_and_bias, scaled
from keras_qat.training.layers.scheduled_layer import Phase

__all__ = ["Codes", "codes_of", "factors", "folded", "gained", "quantized_parts", "with_gains"]

_layers = backend.keras.layers


class Codes(NamedTuple):
    """A folded kernel, quantized.

    Args:
        q: the quantized values, whole numbers in float32.
        scale: real value of 1, a scalar.
        gains: for each output channel the size of what is quantized over what it was.
    """

    q: Any
    scale: Any
    gains: Any


def codes_of(wrapper: Any) -> Codes:
    """The folded kernel of a wrapper, quantized."""
    return _quantized(wrapper, *_parts(wrapper))


def _parts(wrapper: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """The kernel of a wrapper, its factors (float32), and its axes of output channels.

    For an affine layer it is 1 for each channel; without BatchNormalization factors are 1.
    """
    factor, _ = factor_and_bias(wrapper, tf.float64)
    if not wrapper.weight_axes:
        return tf.ones_like(factor, tf.float32), tf.cast(factor, tf.float32), (-1,)
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = tf.convert_to_tensor(getattr(wrapper.layer, name))
    if factor is None:
        factor = tf.ones([math.prod(kernel.shape[axis] for axis in axes)])
    return kernel, tf.cast(factor, tf.float32), axes


def folded(wrapper: Any) -> Any:
    """The kernel of a wrapper with its BatchNormalization folded in, in float."""
    kernel, factor, axes = _parts(wrapper)
    return scaled(kernel, axes, factor)


def factors(wrapper: Any) -> Any:
    """What each weight of a wrapper is multiplied by when it is folded."""
    kernel, factor, axes = _parts(wrapper)
    return scaled(tf.ones_like(kernel), axes, factor)


def _quantized(wrapper: Any, kernel: Any, factor: Any, axes: tuple[int, ...]) -> Codes:
    bits = wrapper.weight_spec.bits if wrapper.weight_axes else 8
    product = scaled(kernel, axes, factor)
    limit = fake_quant.channel_limits(product, ())
    q = fake_quant.quantize_channels(product, limit, bits)
    scale = tf.reshape(limit, []) / float(2 ** (bits - 1) - 1)
    inner = [axis for axis in range(-len(kernel.shape), 0) if axis not in axes]
    before, after = (
        tf.sqrt(tf.reshape(tf.reduce_sum(each * each, inner), [-1])) for each in (product, q)
    )
    return Codes(q, scale, tf.math.divide_no_nan(after * scale, before))


def quantized_parts(wrapper: Any, phase: Phase) -> tuple[Any, Any]:
    """For training: a kernel of the float one's size, with its gradient, and the gains.

    Without quantization the kernel itself and gains of 1.
    """
    kernel, factor, axes = _parts(wrapper)
    values, factor = tf.stop_gradient(kernel), tf.stop_gradient(factor)

    def quantized() -> tuple[Any, Any]:
        q, scale, gains = _quantized(wrapper, values, factor, axes)
        lives = gains > 0.0
        back = scale / tf.where(lives, factor * gains, 1.0)
        inside = scaled(tf.ones_like(values), axes, tf.cast(lives, tf.float32)) > 0.0
        return tf.where(inside, scaled(q, axes, back), values), gains

    parts = cond(phase.quantizing, quantized, lambda: (values, tf.ones_like(factor)))
    return straight_through(lambda _: tf.identity(parts[0]), kernel), parts[1]


def with_gains(norm: Any, gains: Any) -> Any:
    """A context in which a BatchNormalization has its gammas times gains, with their gradient."""
    gamma = tf.convert_to_tensor(norm.gamma) if norm.scale else tf.ones_like(gains)
    gamma = straight_through(lambda gamma: gamma * tf.cast(gains, gamma.dtype), gamma)
    return backend.swapped(norm, gamma=gamma, scale=True)


def gained(wrapper: Any, bias: Any, gains: Any) -> Any:
    """The bias that `factor_and_bias` gives, or an affine layer's output, with gains.

    What is added behind the factor stays as it is; without a factor that is all of it.
    """
    if wrapper.batch_norm is None and wrapper.weight_axes:
        return bias
    offset, dtype = _offset(wrapper), bias.dtype
    offset = tf.cast(0.0 if offset is None else offset, dtype)
    return (bias - offset) * tf.cast(gains, dtype) + offset


def _offset(wrapper: Any) -> Any:
    layer = wrapper.layer
    norm = layer if isinstance(layer, _layers.BatchNormalization) else wrapper.batch_norm
    if norm is not None:
        return norm.beta if norm.center else None
    return layer.offset if isinstance(layer, _layers.Rescaling) else None
