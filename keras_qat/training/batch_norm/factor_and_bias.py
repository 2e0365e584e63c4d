"""Computes the factor and the bias that replace a BatchNormalization after a layer.

An affine layer multiplies each channel by a number and adds another number. Examples are
BatchNormalization, Normalization, Rescaling and ConvNeXt's LayerScale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from keras_qat.config.specs import QuantSpec
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.fake_quantization.weight_quantizer import WeightQuantizer

_layers = backend.keras.layers


def compute_factor_and_bias(wrapper: Weighted, dtype: tf.DType = tf.float32) -> tuple[Any, Any]:
    """Returns the factor and bias of each output channel at inference.

    For each channel, `BatchNorm(conv(x, W) + b)` equals `conv(x, a * W) + a * (b - mean) + beta`,
    with the factor `a = gamma / sqrt(variance + epsilon)`.

    Args:
        wrapper: the layer and the BatchNormalization after it, or an affine layer.
        dtype: the type of the computation and of the results.

    Returns:
        Two vectors. The factor is None for a layer with a kernel but without BatchNormalization.
        The bias is None if nothing is added.
    """
    layer, norm = wrapper.layer, wrapper.batch_norm
    factor, bias = None, getattr(layer, "bias", None)
    bias = None if bias is None else tf.cast(bias, dtype)
    if not wrapper.weight_axes:
        channels = wrapper.channels
        if isinstance(layer, _layers.Normalization):
            mean, variance = (
                tf.reshape(tf.cast(moment, dtype), [-1]) for moment in (layer.mean, layer.variance)
            )
            deviation = tf.maximum(tf.sqrt(variance), backend.keras.backend.epsilon())
            factor, bias = (deviation, mean) if layer.invert else (1 / deviation, -mean / deviation)
        elif isinstance(layer, _layers.Rescaling):
            factor, bias = (
                tf.cast(np.asarray(term, np.float32), dtype) for term in (layer.scale, layer.offset)
            )
        elif isinstance(layer, _layers.BatchNormalization):
            norm = layer
        else:  # ConvNeXt's LayerScale.
            factor = tf.cast(layer.gamma, dtype)
            bias = tf.zeros_like(factor)
        if norm is None:
            factor, bias = (tf.broadcast_to(term, [channels]) for term in (factor, bias))
        else:
            factor, bias = fold_normalization(bias, norm, dtype)
        return factor * tf.constant(getattr(layer, "input_scale", 1.0), dtype), bias
    return (factor, bias) if norm is None else fold_normalization(bias, norm, dtype)


def fold_normalization(
    bias: tf.Tensor, norm: keras.layers.Layer, dtype: tf.DType = tf.float32
) -> tuple[Any, Any]:
    """Returns `(factor, offset)` with `factor * x + offset == norm(x + bias)` at inference."""
    factor = tf.math.rsqrt(tf.cast(norm.moving_variance, dtype) + norm.epsilon)
    if norm.scale:
        factor *= tf.cast(norm.gamma, dtype)
    bias = (0.0 if bias is None else bias) - tf.cast(norm.moving_mean, dtype)
    bias *= factor
    if norm.center:
        bias += tf.cast(norm.beta, dtype)
    return factor, bias


def scale_channels(kernel: tf.Tensor, channel_axes: tuple[int, ...], factor: tf.Tensor) -> Any:
    """Multiplies each output channel of a kernel by its element of the vector `factor`."""
    rank = len(kernel.shape)
    shape = [kernel.shape[axis] if axis in channel_axes else 1 for axis in range(-rank, 0)]
    return kernel * tf.reshape(factor, shape)


class Weighted(Protocol):
    """The attributes of `QuantizeWrapper` that are needed to fold a BatchNormalization."""

    layer: keras.layers.Layer
    batch_norm: Any
    """The BatchNormalization after the layer, or None."""
    weight_axes: dict[str, tuple[int, ...]]
    """Maps paths of weights, such as "kernel", to the axes of the output channels, counted from the
    end. Empty for an affine layer."""
    weight_spec: QuantSpec | None
    weight_quantizers: Mapping[str, WeightQuantizer]
    """Maps the path of each quantized weight to its quantizer."""
    channels: int
    state_bits: int
    """Bits of the hidden state of an LSTM between steps."""
    inner: dict[str, ActivationQuantizer]
    """Maps names of tensors inside a step of a recurrent layer to their quantizers."""
