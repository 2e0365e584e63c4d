"""Bias correction: changes biases to compensate for the mean error of quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, map_values
from keras_qat.keras2.backend import keras, one_at_a_time
from keras_qat.training.batch_norm import fold_modes
from keras_qat.training.batch_norm.factor_and_bias import fold_normalization
from keras_qat.training.fake_quantization.phase import IN_FLOAT, QUANTIZED, Phase
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.post_training.sweep import Part, Tensors, sweep, walk

BATCH = 32
"""Number of examples that are computed at a time."""


@one_at_a_time
def bias_correction(
    model: keras.Model,
    data: object,
    steps: int | None = None,
    batch_size: int | None = None,
    *,
    verbose: int = 0,
) -> None:
    """Corrects biases for the mean error of quantization, without labels.

    Rounded weights shift the mean of a layer's outputs. The mean difference from the float model is
    subtracted from the bias, or from the offset of the BatchNormalization after the layer. Layers
    are corrected from first to last. Each layer reads the quantized outputs of corrected layers.

    A correction must also work for other data. Therefore a correction is computed from each half of
    the examples, and tested on the other half. A channel only changes if this brings the outputs
    after the activation closer to the float model. Layers with neither a bias nor a
    BatchNormalization do not change. Layers that are called several times do not change.

    Args:
        model: a calibrated quantization-aware model. Its weights change.
        data: a few hundred inputs without labels, all held in memory: an array, a list or dict of
            arrays, a `tf.data.Dataset`, a `keras.utils.Sequence`, or a generator of batches.
            Similar examples, such as crops of one photograph, should be next to each other. They
            are then in the same half.
        steps: number of batches to read. By default all. Required for an infinite dataset.
        batch_size: examples per batch of arrays, 32 by default.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model is not quantized or calibrated, or the data does not fit.

    Example:
        >>> keras_qat.calibrate(qat, x_train[:256])
        >>> keras_qat.bias_correction(qat, x_train[:256])

    Source: Nagel et al. 2019 (arXiv:1906.04721).
    """

    def visit(part: Part, in_float: list[Tensors], quantized: list[Tensors]) -> None:
        for call in part.alone:
            variable = _find_variable(call.layer)
            if call.layer.weight_quantizers and variable is not None:
                inputs = [
                    tf.concat([tensors[call.inputs[0]] for tensors in batches], 0)
                    for batches in (in_float, quantized)
                ]
                shift_output(call.layer, _find_shift(call.layer, variable, *inputs))

    sweep(model, data, visit, "Bias correction", steps, batch_size, verbose)


def _find_shift(
    wrapper: QuantizeWrapper, variable: tf.Variable, in_float: tf.Tensor, quantized: tf.Tensor
) -> Any:
    """Return the mean error of each channel, or 0 if correcting it does not help other examples."""
    fold = fold_modes.FOLDS[wrapper.fold]
    activation = wrapper.activation or tf.identity
    middle = int(in_float.shape[0] + 1) // 2
    halves = [slice(None, middle), slice(middle, None) if in_float.shape[0] > 1 else slice(None)]

    def over_batches(half: slice, measure: Callable[[Any, Any], Any]) -> np.ndarray:
        x, q = in_float[half], quantized[half]
        parts = [slice(at, at + BATCH) for at in range(0, int(x.shape[0]), BATCH)]
        sums = [
            tf.reduce_sum(
                tf.cast(
                    measure(fold(wrapper, x[part], IN_FLOAT), fold(wrapper, q[part], QUANTIZED)),
                    tf.float64,
                ),
                0,
            ).numpy()
            for part in parts
        ]
        return _average_over_axes(np.sum(sums, 0) / int(x.shape[0]), variable)

    def error(half: slice, shift: Any) -> np.ndarray:
        return over_batches(half, lambda y, q: (activation(y) - activation(q + shift)) ** 2)

    shifts = [over_batches(half, lambda y, q: y - q) for half in halves]
    gain = sum(
        error(half, 0.0) - error(half, shift)
        for half, shift in zip(halves, reversed(shifts), strict=True)
    )
    return np.where(gain > 0, np.mean(shifts, 0), 0).astype(np.float32)


def compute_float_means(part: Part, in_float: list[Tensors]) -> dict[QuantizeWrapper, np.ndarray]:
    """Returns the mean float output of each wrapper with quantized weights in a part."""
    return {
        call.layer: _mean(call, batches, IN_FLOAT)
        for call, batches in walk(part, in_float, IN_FLOAT)
        if call in part.alone and call.layer.weight_quantizers
    }


def correct(part: Part, quantized: list[Tensors], means: dict[QuantizeWrapper, np.ndarray]) -> None:
    """Changes the biases of wrappers to bring their mean outputs to `means`."""
    for call, batches in walk(part, quantized, QUANTIZED):
        if call.layer in means:
            shift_output(call.layer, means[call.layer] - _mean(call, batches, QUANTIZED))


def _mean(call: Call, batches: list[Tensors], phase: Phase) -> np.ndarray:
    """Return a wrapper's output before the activation, averaged over all examples."""
    fold = fold_modes.FOLDS[call.layer.fold]
    total, count = np.zeros(()), 0
    for tensors in batches:
        y = fold(call.layer, map_values(tensors.__getitem__, call.args[0]), phase)
        total = total + tf.reduce_sum(tf.cast(y, tf.float64), 0).numpy()
        count += int(y.shape[0])
    return total / count


def _find_variable(wrapper: QuantizeWrapper) -> Any:
    """Return the variable that shifts a wrapper's outputs, or None if there is none."""
    norm = wrapper.batch_norm
    if norm is None:
        return getattr(wrapper.layer, "bias", None)
    return norm.beta if norm.center else norm.moving_mean


def shift_output(wrapper: QuantizeWrapper, shift: np.ndarray) -> None:
    """Adds `shift` to the outputs of a wrapper, by changing its bias, beta or moving mean.

    `shift` has the shape of one example's output. It is averaged to the shape of the variable.
    """
    norm, variable = wrapper.batch_norm, _find_variable(wrapper)
    if variable is None:
        return
    shift = _average_over_axes(shift, variable)
    if norm is None or norm.center:
        variable.assign_add(shift)
    else:
        factor = fold_normalization(None, norm)[0].numpy()
        variable.assign_sub(shift / np.where(factor == 0, np.inf, factor))


def _average_over_axes(shift: np.ndarray, variable: tf.Variable) -> np.ndarray:
    """Average `shift` to the shape of `variable`, for example over all pixels of an image."""
    rank = len(variable.shape)
    shift = np.mean(shift, axis=tuple(range(shift.ndim - rank)))
    axes = tuple(axis for axis in range(rank) if variable.shape[axis] == 1)
    return np.mean(shift, axis=axes, keepdims=True).astype(np.float32)
