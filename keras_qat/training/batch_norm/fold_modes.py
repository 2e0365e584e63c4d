"""How training combines weight quantization with the BatchNormalization behind a layer."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.control_flow import Switch, select
from keras_qat.keras2 import backend
from keras_qat.ops.registry import count_gates
from keras_qat.training.batch_norm import per_tensor_fold
from keras_qat.training.batch_norm.contrib_correction import CorrectedFold
from keras_qat.training.batch_norm.weighted import Weighted
from keras_qat.training.layers.recurrent.lstm import lstm_quantized
from keras_qat.training.layers.recurrent.unrolled import unrolled_quantized
from keras_qat.training.layers.scheduled_layer import Phase
from keras_qat.training.layers.weight_quantizer import weight_at


def normalize_per_channel(wrapper: Weighted, inputs: Any, phase: Phase) -> Any:
    """Quantizes the unfolded kernel, then normalizes: BatchNorm(conv(x, Q(W))).

    With symmetric weights and one range per output channel, Q(a W) = a Q(W) for any factor a of a
    channel. So the folded kernel has the same codes, and training needs only one convolution and
    Keras' own BatchNormalization.
    """
    x = apply_quantized(wrapper, inputs, phase)
    if wrapper.batch_norm is not None:
        x = normalized(wrapper.batch_norm, x, phase)
    return x


def normalized(norm: Any, x: Any, phase: Phase) -> Any:
    """Calls a BatchNormalization, with the moving statistics once they are frozen.

    Where a `Switch` tells, both are computed, and frozen statistics keep their values.
    """
    if isinstance(phase.frozen, Switch):
        return _normalized_twice(norm, x, phase.frozen)
    return norm(x, training=is_learning(phase))


def _normalized_twice(norm: Any, x: Any, frozen: Switch) -> Any:
    """Calls a BatchNormalization with both statistics, and selects what is `frozen` or is not."""
    names = [name for name in ("gamma", "beta") if getattr(norm, name) is not None]
    weights = [tf.convert_to_tensor(getattr(norm, name)) for name in names]
    momentum = tf.where(frozen.on, 1.0, norm.momentum)

    @tf.custom_gradient
    def normalized(*inputs: Any) -> Any:
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

        def gradient(upstream: Any) -> list[Any]:
            gradients = (back(upstream) for back in backward)
            return [select(frozen.on, *pair) for pair in zip(*gradients, strict=True)]

        return select(frozen.on, *results), gradient

    return normalized(x, *weights)


def is_learning(phase: Phase) -> Any:
    """Whether BatchNormalization uses the batch's statistics and updates the moving ones."""
    if phase.training is False or phase.frozen is True:
        return False
    if phase.training is True:
        return phase.frozen is False or tf.logical_not(phase.frozen)
    return tf.logical_and(phase.training, tf.logical_not(phase.frozen))


def fold_with_correction(wrapper: Weighted, inputs: Any, phase: Phase) -> Any:
    """Quantizes the kernel folded with the moving variance, as `tf.contrib.quantize` does."""
    if wrapper.batch_norm is None:
        return apply_quantized(wrapper, inputs, phase)
    learning = wrapper.batch_norm.trainable and is_learning(phase)
    return CorrectedFold(wrapper, inputs, phase)(learning)


def normalize_per_tensor(wrapper: Weighted, inputs: Any, phase: Phase) -> Any:
    """Quantizes the folded kernel with one scale for the whole tensor: see `per_tensor_fold`."""
    norm, layer = wrapper.batch_norm, wrapper.layer
    if norm is None and wrapper.weight_axes:
        return apply_quantized(wrapper, inputs, phase)
    kernel, gains = per_tensor_fold.quantized_parts(wrapper, phase)
    if norm is not None:
        (name,) = wrapper.weight_axes
        with backend.swap_attributes(layer, **{name: tf.cast(kernel, layer.compute_dtype)}):
            x = layer(inputs)
        with per_tensor_fold.with_gains(norm, gains):
            return norm(x, training=is_learning(phase))
    if isinstance(layer, backend.keras.layers.BatchNormalization):
        with per_tensor_fold.with_gains(layer, gains):
            return layer(inputs, training=is_learning(phase))
    return per_tensor_fold.gained(wrapper, layer(inputs), gains)


def apply_quantized(wrapper: Weighted, inputs: Any, phase: Phase) -> Any:
    """Calls the wrapped layer with its weights quantized, none of them folded."""
    layer = wrapper.layer
    quantized = {
        name: tf.cast(quantizer(weight_at(layer, name), phase), layer.compute_dtype)
        for name, quantizer in wrapper.weight_quantizers.items()
    }
    if count_gates(layer) > 1:
        return lstm_quantized(layer, inputs, quantized, phase, wrapper.state_bits)
    if wrapper.inner:
        return unrolled_quantized(wrapper, inputs, quantized, phase)
    if isinstance(layer, backend.keras.layers.BatchNormalization):
        return normalized(layer, inputs, phase)
    with backend.swap_attributes(layer, **quantized):
        return layer(inputs)


FOLDS = {
    "per_channel": normalize_per_channel,
    "per_tensor": normalize_per_tensor,
    "correction": fold_with_correction,
}
"""Name in a recipe -> function that computes a layer and its BatchNormalization."""
