"""How weight quantization and the BatchNormalization behind a layer go together in training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat import backend
from keras_qat.layers import bias
from keras_qat.layers.scheduled import Phase

__all__ = ["FOLDS"]


def normalize_per_channel(wrapper: Any, inputs: Any, phase: Phase) -> Any:
    """Quantizes the kernel as it is, then normalizes: BatchNorm(conv(x, Q(W))).

    With symmetric weights and one range per output channel, Q(a W) = a Q(W) for a per channel
    a, so the codes are those of the folded kernel, with one convolution and Keras' own
    BatchNormalization. Exact when folded at export.
    """
    x = apply_quantized(wrapper, inputs, phase)
    if wrapper.batch_norm is not None:
        x = wrapper.batch_norm(x, training=is_learning(phase))
    return x + bias.rounding(wrapper, phase)


def is_learning(phase: Phase) -> Any:
    """Whether BatchNormalization takes the batch's statistics, and learns from them."""
    if phase.training is False or phase.frozen is True:
        return False
    return tf.logical_and(phase.training, tf.logical_not(phase.frozen))


def fold_with_correction(wrapper: Any, inputs: Any, phase: Phase) -> Any:
    """Quantizes the kernel folded with the moving variance: `tf.contrib.quantize`'s form.

    The batch's statistics come from a second convolution with the float kernel. The result is
    corrected from the moving to the batch's statistics until BatchNormalization is frozen, so
    that training sees ordinary batch normalization while the folded kernel stays smooth.
    """
    layer, norm = wrapper.layer, wrapper.batch_norm
    if norm is None:
        return apply_quantized(wrapper, inputs, phase)
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = tf.convert_to_tensor(getattr(layer, name))
    moving_mean, moving_variance = norm.moving_mean.read_value(), norm.moving_variance.read_value()
    gamma = tf.convert_to_tensor(norm.gamma) if norm.scale else tf.ones_like(moving_mean)
    beta = tf.convert_to_tensor(norm.beta) if norm.center else tf.zeros_like(moving_mean)
    kernel_shape = [
        kernel.shape[axis] if axis in axes else 1 for axis in range(-kernel.shape.rank, 0)
    ]

    def deviation_inverse(variance: Any) -> Any:
        return tf.math.rsqrt(variance + norm.epsilon)

    def scaled(weights: Any, factor: Any) -> Any:
        return weights * tf.reshape(factor, kernel_shape)

    def convolve(weights: Any) -> Any:
        with backend.swapped(layer, **{name: weights}):
            return layer(inputs)

    def quantized(folded: Any) -> Any:
        quantizer = wrapper.weight_quantizers.get(name)
        return folded if quantizer is None else quantizer(folded, phase)

    def training() -> Any:
        z = convolve(kernel)
        channel_axis = norm.axis[0]
        reduced = [axis for axis in range(len(z.shape)) if axis != channel_axis]
        mean, variance = tf.nn.moments(z, reduced)
        to_moving = deviation_inverse(moving_variance) / deviation_inverse(variance)
        folded = scaled(scaled(kernel, to_moving), gamma * deviation_inverse(variance))
        y = convolve(quantized(folded))
        batch_offset = beta - mean * gamma * deviation_inverse(variance)
        to_moving_offset = gamma * (
            mean * deviation_inverse(variance) - moving_mean * deviation_inverse(moving_variance)
        )
        per_channel = [-1 if axis == channel_axis else 1 for axis in range(len(z.shape))]

        def channelwise(values: Any) -> Any:
            return tf.reshape(values, per_channel)

        frozen = phase.frozen if norm.trainable else True
        momentum = backend.cond(frozen, lambda: tf.ones(()), lambda: tf.constant(norm.momentum))
        count = tf.cast(tf.size(z) / tf.size(mean), z.dtype)
        updates = (
            (norm.moving_mean, moving_mean, mean),
            # Bessel's correction: the estimate of the population's variance.
            (norm.moving_variance, moving_variance, variance * (count / tf.maximum(count - 1, 1))),
        )
        for variable, moving, batch in updates:
            variable.assign_sub((moving - tf.stop_gradient(batch)) * (1.0 - momentum))
        recip = backend.cond(frozen, lambda: tf.ones_like(mean), lambda: 1.0 / to_moving)
        offset = backend.cond(frozen, lambda: to_moving_offset, lambda: tf.zeros_like(mean))
        return y * channelwise(recip) + channelwise(offset) + channelwise(batch_offset)

    def inference() -> Any:
        factor = gamma * deviation_inverse(moving_variance)
        y = convolve(quantized(scaled(kernel, factor)))
        offset = beta - moving_mean * factor
        return y + tf.reshape(
            offset, [-1 if axis == norm.axis[0] else 1 for axis in range(len(y.shape))]
        )

    return backend.cond(phase.training, training, inference)


def apply_quantized(wrapper: Any, inputs: Any, phase: Phase) -> Any:
    """The wrapped layer on `inputs`, with its weights quantized as they are."""
    layer = wrapper.layer
    quantized = {
        name: quantizer(getattr(layer, name), phase)
        for name, quantizer in wrapper.weight_quantizers.items()
    }
    if isinstance(layer, backend.keras.layers.BatchNormalization):
        return layer(inputs, training=is_learning(phase))
    with backend.swapped(layer, **quantized):
        return layer(inputs)


FOLDS = {"per_channel": normalize_per_channel, "correction": fold_with_correction}
"""Name, as recipes give it -> what computes layer and BatchNormalization."""
