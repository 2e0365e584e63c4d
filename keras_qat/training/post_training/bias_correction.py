"""Bias correction: biases compensate for the mean error of quantization."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import one_at_a_time
from keras_qat.training.batch_norm import fold_modes
from keras_qat.training.batch_norm.factor_and_bias import normalization
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.layers.scheduled_layer import IN_FLOAT, QUANTIZED, Phase
from keras_qat.training.post_training.sweep import Part, Tensors, sweep, walk


@one_at_a_time
def bias_correction(
    model: Any,
    data: Any,
    steps: int | None = None,
    batch_size: int | None = None,
    *,
    verbose: int = 0,
) -> None:
    """Corrects biases for the mean error of quantization, without labels.

    Rounded weights shift the mean of a layer's outputs. The mean difference from the float model is
    subtracted from the layer's bias, or from the offset of the BatchNormalization behind it. Layers
    are corrected from first to last, with the layers in front quantized and corrected already.
    Layers without bias and BatchNormalization, and layers that are called several times, stay.

    Args:
        model: a calibrated quantization-aware model; its weights change.
        data: a few hundred inputs without labels, all held in memory: an array, a list or dict of
            arrays, a `tf.data.Dataset`, a `keras.utils.Sequence`, or a generator of batches.
        steps: how many batches to read; all by default. An endless dataset needs it.
        batch_size: examples per batch of arrays, 32 by default.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model is not quantized or calibrated, or the data does not fit it.

    Example:
        >>> keras_qat.calibrate(qat, x_train[:256])
        >>> keras_qat.bias_correction(qat, x_train[:256])

    Source: Nagel et al. 2019 (arXiv:1906.04721).
    """

    def visit(part: Part, in_float: list[Tensors], quantized: list[Tensors]) -> None:
        correct(part, quantized, means_in_float(part, in_float))

    sweep(model, data, visit, "Bias correction", steps, batch_size, verbose)


def means_in_float(part: Part, in_float: list[Tensors]) -> dict[QuantizeWrapper, np.ndarray]:
    """Returns the mean float output of each wrapper of a part that has quantized weights."""
    return {
        call.layer: _mean(call, batches, IN_FLOAT)
        for call, batches in walk(part, in_float, IN_FLOAT)
        if call in part.alone and call.layer.weight_quantizers
    }


def correct(part: Part, quantized: list[Tensors], means: dict[QuantizeWrapper, np.ndarray]) -> None:
    """Shifts the outputs of wrappers, from first to last, so that they have the given means."""
    for call, batches in walk(part, quantized, QUANTIZED):
        if call.layer in means:
            shift_output(call.layer, means[call.layer] - _mean(call, batches, QUANTIZED))


def _mean(call: Call, batches: list[Tensors], phase: Phase) -> np.ndarray:
    """Returns the mean output of a wrapper in front of its activation, over all examples."""
    inputs = [tensors[call.inputs[0]] for tensors in batches]
    fold = fold_modes.FOLDS[call.layer.fold]
    outputs = [fold(call.layer, x, phase) for x in inputs]
    sums = [tf.reduce_sum(tf.cast(y, tf.float64), 0).numpy() for y in outputs]
    return np.sum(sums, 0) / sum(int(y.shape[0]) for y in outputs)


def shift_output(wrapper: QuantizeWrapper, shift: np.ndarray) -> None:
    """Adds `shift`, which has the shape of an output, to the channels on average."""
    norm, bias = wrapper.batch_norm, getattr(wrapper.layer, "bias", None)
    if norm is None:
        if bias is not None:
            bias.assign_add(_reduced(shift, bias))
    elif norm.center:
        norm.beta.assign_add(_reduced(shift, norm.beta))
    else:
        factor = normalization(None, norm)[0].numpy()
        shift = _reduced(shift, norm.moving_mean)
        norm.moving_mean.assign_sub(shift / np.where(factor == 0, np.inf, factor))


def _reduced(shift: np.ndarray, variable: Any) -> np.ndarray:
    """Averages a shift over the axes that a variable lacks or has with size 1."""
    rank = len(variable.shape)
    shift = np.mean(shift, axis=tuple(range(shift.ndim - rank)))
    axes = tuple(axis for axis in range(rank) if variable.shape[axis] == 1)
    return np.mean(shift, axis=axes, keepdims=True).astype(np.float32)
