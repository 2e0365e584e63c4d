"""How weight quantization and the BatchNormalization behind a layer go together in training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.frontend.keras2 import backend
from keras_qat.training.batch_norm import per_tensor_fold
from keras_qat.training.batch_norm.contrib_correction import CorrectedFold
from keras_qat.training.layers.recurrent.lstm import lstm_quantized
from keras_qat.training.layers.recurrent.unrolled import unrolled_quantized
from keras_qat.training.layers.scheduled_layer import Phase
from keras_qat.training.layers.weight_quantizer import weight_at

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
    return x


def is_learning(phase: Phase) -> Any:
    """Whether BatchNormalization takes the batch's statistics, and learns from them."""
    if phase.training is False or phase.frozen is True:
        return False
    if phase.training is True:
        return phase.frozen is False or tf.logical_not(phase.frozen)
    return tf.logical_and(phase.training, tf.logical_not(phase.frozen))


def fold_with_correction(wrapper: Any, inputs: Any, phase: Phase) -> Any:
    """Quantizes the kernel folded with the moving variance: `tf.contrib.quantize`'s form."""
    if wrapper.batch_norm is None:
        return apply_quantized(wrapper, inputs, phase)
    learning = wrapper.batch_norm.trainable and is_learning(phase)
    return CorrectedFold(wrapper, inputs, phase)(learning)


def normalize_per_tensor(wrapper: Any, inputs: Any, phase: Phase) -> Any:
    """The same with one scale for the folded kernel: `layers.per_tensor`."""
    norm, layer = wrapper.batch_norm, wrapper.layer
    if norm is None and wrapper.weight_axes:
        return apply_quantized(wrapper, inputs, phase)
    kernel, gains = per_tensor_fold.quantized_parts(wrapper, phase)
    if norm is not None:
        (name,) = wrapper.weight_axes
        with backend.swapped(layer, **{name: tf.cast(kernel, layer.compute_dtype)}):
            x = layer(inputs)
        with per_tensor_fold.with_gains(norm, gains):
            return norm(x, training=is_learning(phase))
    if isinstance(layer, backend.keras.layers.BatchNormalization):
        with per_tensor_fold.with_gains(layer, gains):
            return layer(inputs, training=is_learning(phase))
    return per_tensor_fold.gained(wrapper, layer(inputs), gains)


def apply_quantized(wrapper: Any, inputs: Any, phase: Phase) -> Any:
    """The wrapped layer on `inputs`, with its weights quantized as they are."""
    layer = wrapper.layer
    quantized = {
        name: tf.cast(quantizer(weight_at(layer, name), phase), layer.compute_dtype)
        for name, quantizer in wrapper.weight_quantizers.items()
    }
    if isinstance(layer, backend.keras.layers.LSTM):
        return lstm_quantized(layer, inputs, quantized, phase, wrapper.state_bits)
    if wrapper.inner:
        return unrolled_quantized(wrapper, inputs, quantized, phase)
    if isinstance(layer, backend.keras.layers.BatchNormalization):
        return layer(inputs, training=is_learning(phase))
    with backend.swapped(layer, **quantized):
        return layer(inputs)


FOLDS = {
    "per_channel": normalize_per_channel,
    "per_tensor": normalize_per_tensor,
    "correction": fold_with_correction,
}
"""Name, as recipes give it -> what computes layer and BatchNormalization."""
