"""BatchNormalization folding for weights that share one scale per tensor.

BatchNormalization multiplies each output channel, so with a single scale the codes of one channel
depend on the factors of all. Training therefore quantizes the folded kernel a W, with the factor a
of the moving statistics, and takes it apart again: a convolution with Q(a W) / a, then Keras' own
BatchNormalization.

Quantization changes the norm of a channel that has only a few codes, which the batch's statistics
would hide in training. So the convolution keeps the norm of W, and gamma is multiplied by the
channel's gain: the norm after quantization over the norm before. Training then computes the same
as the folded kernel, up to the batch's statistics. A channel that is quantized to zeros has the
gain 0 and keeps the statistics of the float kernel, so that it can recover.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.control_flow import cond, straight_through
from keras_qat.keras2 import backend
from keras_qat.training.batch_norm.factor_and_bias import factor_and_bias, scaled
from keras_qat.training.batch_norm.weighted import Weighted
from keras_qat.training.layers.scheduled_layer import Phase

_layers = backend.keras.layers


class Codes(NamedTuple):
    """A quantized folded kernel.

    Args:
        q: the quantized values, whole numbers in float32.
        scale: the scale, a scalar.
        gains: for each output channel its norm after quantization over its norm before.
    """

    q: Any
    scale: Any
    gains: Any


def codes_of(wrapper: Weighted) -> Codes:
    """Folds and quantizes the kernel of a wrapper."""
    return _quantized(wrapper, *_parts(wrapper))


def _parts(wrapper: Weighted) -> tuple[Any, Any, tuple[int, ...]]:
    """Returns the kernel of a wrapper, its factors (float32), and the axes of its output channels.

    The kernel of an affine layer is 1 for each channel; without BatchNormalization factors are 1.
    """
    factor, _ = factor_and_bias(wrapper, tf.float64)
    if not wrapper.weight_axes:
        return tf.ones_like(factor, tf.float32), tf.cast(factor, tf.float32), (-1,)
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = tf.convert_to_tensor(getattr(wrapper.layer, name))
    if factor is None:
        factor = tf.ones([math.prod(kernel.shape[axis] for axis in axes)])
    return kernel, tf.cast(factor, tf.float32), axes


def folded(wrapper: Weighted) -> Any:
    """Folds the BatchNormalization of a wrapper into its kernel, in float."""
    kernel, factor, axes = _parts(wrapper)
    return scaled(kernel, axes, factor)


def factors(wrapper: Weighted) -> Any:
    """Returns the factor that folding multiplies each weight of a wrapper by."""
    kernel, factor, axes = _parts(wrapper)
    return scaled(tf.ones_like(kernel), axes, factor)


def _quantized(wrapper: Weighted, kernel: Any, factor: Any, axes: tuple[int, ...]) -> Codes:
    bits = 8
    if wrapper.weight_axes:
        assert wrapper.weight_spec is not None
        bits = wrapper.weight_spec.bits
    product = scaled(kernel, axes, factor)
    limit = fake_quant.channel_limits(product, ())
    if wrapper.weight_spec is not None and wrapper.weight_spec.power_of_two:
        limit = fake_quant.power_of_two_limits(limit, bits)
    q = fake_quant.quantize_channels(product, limit, bits)
    scale = tf.reshape(limit, []) / float(2 ** (bits - 1) - 1)
    inner = [axis for axis in range(-len(kernel.shape), 0) if axis not in axes]
    before, after = (tf.sqrt(tf.reshape(tf.reduce_sum(x * x, inner), [-1])) for x in (product, q))
    return Codes(q, scale, tf.math.divide_no_nan(after * scale, before))


def quantized_parts(wrapper: Weighted, phase: Phase) -> tuple[Any, Any]:
    """Returns the quantized kernel for training, with the float kernel's norm, and the gains.

    The gradient is the float kernel's. While quantization is off, the kernel stays as it is and
    the gains are 1.
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
    """Runs a block in which a BatchNormalization's gamma is multiplied by the gains."""
    gamma = tf.convert_to_tensor(norm.gamma) if norm.scale else tf.ones_like(gains)
    gamma = straight_through(lambda gamma: gamma * tf.cast(gains, gamma.dtype), gamma)
    return backend.swap_attributes(norm, gamma=gamma, scale=True)


def gained(wrapper: Weighted, bias: Any, gains: Any) -> Any:
    """Applies the gains to the bias of `factor_and_bias`, or to an affine layer's output.

    The part that is added behind the factor stays as it is; without a factor all of it does.
    """
    if wrapper.batch_norm is None and wrapper.weight_axes:
        return bias
    offset, dtype = _offset(wrapper), bias.dtype
    offset = tf.cast(0.0 if offset is None else offset, dtype)
    return (bias - offset) * tf.cast(gains, dtype) + offset


def _offset(wrapper: Weighted) -> Any:
    layer = wrapper.layer
    norm = layer if isinstance(layer, _layers.BatchNormalization) else wrapper.batch_norm
    if norm is not None:
        return norm.beta if norm.center else None
    return layer.offset if isinstance(layer, _layers.Rescaling) else None
