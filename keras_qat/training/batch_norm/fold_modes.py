"""How training combines weight quantization with the BatchNormalization after a layer.

`W` is the kernel, and `Q` quantizes. BatchNormalization multiplies each output channel by a factor
`a`. Exported files contain `Q(a * W)`.

With one scale per channel, `Q(a * W)` equals `a * Q(W)`, so training quantizes `W`. With one scale
per tensor, the factors of all channels determine the scale. Training then computes `a` from the
moving statistics. It convolves with `Q(a * W) / a`, and applies Keras' BatchNormalization.

Quantization changes the norm of a channel's weights by a factor, the gain. In the file, the gain
scales the channel's output. In training, BatchNormalization with the batch's statistics would
cancel the gain. Therefore training divides `Q(a * W) / a` by the gain, and multiplies gamma by the
gain. If all weights of a channel are rounded to 0, the gain is 0. The convolution then keeps the
float weights, and the channel can recover.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.control_flow import Switch, cond, select, straight_through
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.ops.registry import count_gates
from keras_qat.training.batch_norm.contrib_correction import CorrectedFold
from keras_qat.training.batch_norm.factor_and_bias import (
    Weighted,
    compute_factor_and_bias,
    scale_channels,
)
from keras_qat.training.fake_quantization.phase import Phase
from keras_qat.training.fake_quantization.weight_quantizer import get_weight
from keras_qat.training.recurrent import simulate_lstm, simulate_unrolled


def normalize_per_channel(wrapper: Weighted, inputs: tf.Tensor, phase: Phase) -> Any:
    """Computes `BatchNorm(conv(x, Q(W)))`.

    With one symmetric range per output channel, this equals a convolution with the folded kernel,
    because `Q(a * W)` equals `a * Q(W)`.
    """
    x = apply_quantized(wrapper, inputs, phase)
    if wrapper.batch_norm is not None:
        x = normalize(wrapper.batch_norm, x, phase)
    return x


def normalize(norm: keras.layers.Layer, x: tf.Tensor, phase: Phase) -> Any:
    """Calls a BatchNormalization. If `phase.frozen`, it uses the moving statistics.

    If `phase.frozen` is a `Switch`, both results are computed, and the `Switch` selects one.
    """
    if isinstance(phase.frozen, Switch):
        return _normalize_twice(norm, x, phase.frozen)
    return norm(x, training=is_learning(phase))


def _normalize_twice(norm: keras.layers.Layer, x: tf.Tensor, frozen: Switch) -> Any:
    names = [name for name in ("gamma", "beta") if getattr(norm, name) is not None]
    weights = [tf.convert_to_tensor(getattr(norm, name)) for name in names]
    momentum = tf.where(frozen.on, 1.0, norm.momentum)

    @tf.custom_gradient
    def compute(*inputs: tf.Tensor) -> Any:
        x, *weights = inputs
        results, backward = [], []
        for training in (False, True):
            swapped = backend.swap_attributes(
                norm, momentum=momentum, **dict(zip(names, weights, strict=True))
            )
            with tf.GradientTape() as tape, swapped:
                tape.watch(inputs)
                results.append(norm(x, training=training))
            backward.append(functools.partial(tape.gradient, results[-1], inputs))

        def gradient(upstream: tf.Tensor) -> list[Any]:
            gradients = (back(upstream) for back in backward)
            return [select(frozen.on, *pair) for pair in zip(*gradients, strict=True)]

        return select(frozen.on, *results), gradient

    return compute(x, *weights)


def is_learning(phase: Phase) -> Any:
    """Returns whether BatchNormalization uses the batch's statistics, as a bool or a tensor."""
    if phase.training is False or phase.frozen is True:
        return False
    if phase.training is True:
        return phase.frozen is False or tf.logical_not(phase.frozen)
    return tf.logical_and(phase.training, tf.logical_not(phase.frozen))


def fold_with_correction(wrapper: Weighted, inputs: tf.Tensor, phase: Phase) -> Any:
    """Computes a layer and its BatchNormalization as in `tf.contrib.quantize`."""
    if wrapper.batch_norm is None:
        return apply_quantized(wrapper, inputs, phase)
    learning = wrapper.batch_norm.trainable and is_learning(phase)
    return CorrectedFold(wrapper, inputs, phase)(learning)


def normalize_per_tensor(wrapper: Weighted, inputs: tf.Tensor, phase: Phase) -> Any:
    """Computes `BatchNorm(conv(x, Q(a * W) / a))` with one scale for the kernel."""
    norm, layer = wrapper.batch_norm, wrapper.layer
    if norm is None and wrapper.weight_axes:
        return apply_quantized(wrapper, inputs, phase)
    kernel, gains = quantize_for_training(wrapper, phase)
    if norm is not None:
        (name,) = wrapper.weight_axes
        with backend.swap_attributes(layer, **{name: tf.cast(kernel, layer.compute_dtype)}):
            x = layer(inputs)
        with use_gains(norm, gains):
            return norm(x, training=is_learning(phase))
    if isinstance(layer, backend.keras.layers.BatchNormalization):
        with use_gains(layer, gains):
            return layer(inputs, training=is_learning(phase))
    return apply_gains(wrapper, layer(inputs), gains)


def apply_quantized(wrapper: Weighted, inputs: tf.Tensor, phase: Phase) -> Any:
    """Calls the layer with quantized weights. BatchNormalization is not folded."""
    layer = wrapper.layer
    quantized = {
        name: tf.cast(quantizer(get_weight(layer, name), phase), layer.compute_dtype)
        for name, quantizer in wrapper.weight_quantizers.items()
    }
    if count_gates(layer) > 1:
        return simulate_lstm(layer, inputs, quantized, phase, wrapper.state_bits)
    if wrapper.inner:
        return simulate_unrolled(layer, wrapper.inner, inputs, quantized, phase)
    if isinstance(layer, backend.keras.layers.BatchNormalization):
        return normalize(layer, inputs, phase)
    with backend.swap_attributes(layer, **quantized):
        return layer(inputs)


FOLDS = {
    "per_channel": normalize_per_channel,
    "per_tensor": normalize_per_tensor,
    "correction": fold_with_correction,
}
"""Maps `Recipe.fold` to a function that computes a layer and the BatchNormalization after it."""


_layers = backend.keras.layers


class QuantizedKernel(NamedTuple):
    """A quantized folded kernel.

    Args:
        q: the quantized values, integers in float32.
        scale: the scale, a scalar.
        gains: for each output channel, the quantized norm divided by the float norm.
    """

    q: Any
    scale: Any
    gains: Any


def quantize_folded(wrapper: Weighted) -> QuantizedKernel:
    return _quantize(wrapper, *_get_kernel(wrapper))


def _get_kernel(wrapper: Weighted) -> tuple[Any, Any, tuple[int, ...]]:
    """Return a wrapper's kernel, a float32 factor for each channel, and the axes of the channels.

    Without BatchNormalization, factors are 1. An affine layer has a kernel of ones.
    """
    factor, _ = compute_factor_and_bias(wrapper, tf.float64)
    if not wrapper.weight_axes:
        return tf.ones_like(factor, tf.float32), tf.cast(factor, tf.float32), (-1,)
    ((name, axes),) = wrapper.weight_axes.items()
    kernel = tf.convert_to_tensor(getattr(wrapper.layer, name))
    if factor is None:
        factor = tf.ones([math.prod(kernel.shape[axis] for axis in axes)])
    return kernel, tf.cast(factor, tf.float32), axes


def fold_kernel(wrapper: Weighted) -> Any:
    """Returns the folded kernel `a * W` of a wrapper, in float."""
    kernel, factor, axes = _get_kernel(wrapper)
    return scale_channels(kernel, axes, factor)


def get_factors(wrapper: Weighted) -> Any:
    """Returns the factors `a` of a wrapper, repeated to the shape of the kernel."""
    kernel, factor, axes = _get_kernel(wrapper)
    return scale_channels(tf.ones_like(kernel), axes, factor)


def _quantize(
    wrapper: Weighted, kernel: tf.Tensor, factor: tf.Tensor, axes: tuple[int, ...]
) -> QuantizedKernel:
    bits = 8
    if wrapper.weight_axes:
        assert wrapper.weight_spec is not None
        bits = wrapper.weight_spec.bits
    product = scale_channels(kernel, axes, factor)
    limit = fake_quant.channel_limits(product, ())
    if wrapper.weight_spec is not None and wrapper.weight_spec.power_of_two:
        limit = fake_quant.power_of_two_limits(limit, bits)
    q = fake_quant.quantize_channels(product, limit, bits)
    scale = tf.reshape(limit, []) / float(2 ** (bits - 1) - 1)
    inner = [axis for axis in range(-len(kernel.shape), 0) if axis not in axes]
    before, after = (tf.sqrt(tf.reshape(tf.reduce_sum(x * x, inner), [-1])) for x in (product, q))
    return QuantizedKernel(q, scale, tf.math.divide_no_nan(after * scale, before))


def quantize_for_training(wrapper: Weighted, phase: Phase) -> tuple[Any, Any]:
    """Returns the kernel for training, and the gains.

    The kernel is `Q(a * W) / a`, divided by the gains. The gradient of `W` equals the gradient of
    this kernel. While quantization is off, the kernel is `W`, and the gains are 1.
    """
    kernel, factor, axes = _get_kernel(wrapper)
    values, factor = tf.stop_gradient(kernel), tf.stop_gradient(factor)

    def quantize() -> tuple[tf.Tensor, tf.Tensor]:
        q, scale, gains = _quantize(wrapper, values, factor, axes)
        lives = gains > 0.0
        back = scale / tf.where(lives, factor * gains, 1.0)
        inside = scale_channels(tf.ones_like(values), axes, tf.cast(lives, tf.float32)) > 0.0
        return tf.where(inside, scale_channels(q, axes, back), values), gains

    kernel_and_gains = cond(phase.quantizing, quantize, lambda: (values, tf.ones_like(factor)))
    return straight_through(lambda _: tf.identity(kernel_and_gains[0]), kernel), kernel_and_gains[1]


def use_gains(norm: keras.layers.Layer, gains: tf.Tensor) -> Any:
    """Multiplies gamma of a BatchNormalization by the gains inside a `with` block."""
    gamma = tf.convert_to_tensor(norm.gamma) if norm.scale else tf.ones_like(gains)
    gamma = straight_through(lambda gamma: gamma * tf.cast(gains, gamma.dtype), gamma)
    return backend.swap_attributes(norm, gamma=gamma, scale=True)


def apply_gains(wrapper: Weighted, bias: tf.Tensor, gains: tf.Tensor) -> Any:
    """Multiplies `bias` by the gains, except for the part that does not depend on the kernel.

    In a folded bias `a * (b - mean) + beta`, this part is `beta`. For a Rescaling, `bias` may also
    be the layer's output, and this part is the offset.
    """
    if wrapper.batch_norm is None and wrapper.weight_axes:
        return bias
    offset, dtype = _get_offset(wrapper), bias.dtype
    offset = tf.cast(0.0 if offset is None else offset, dtype)
    return (bias - offset) * tf.cast(gains, dtype) + offset


def _get_offset(wrapper: Weighted) -> Any:
    layer = wrapper.layer
    norm = layer if isinstance(layer, _layers.BatchNormalization) else wrapper.batch_norm
    if norm is not None:
        return norm.beta if norm.center else None
    return layer.offset if isinstance(layer, _layers.Rescaling) else None
