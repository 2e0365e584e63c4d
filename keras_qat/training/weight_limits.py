"""Finds ranges of weights with the least squared quantization error.

The limit of an output channel is the end of its symmetric range, from -limit to limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_qat.helper_layers.keras_variants import has_computed_kernel
from keras_qat.keras2.backend import keras
from keras_qat.training.fake_quantization.weight_quantizer import CellQuantizer, WeightQuantizer
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.schedule import list_scheduled_layers

_FACTORS = np.linspace(1.0, 0.2, 81)
"""Limits to try, as fractions of the largest magnitude in the channel."""


def find_least_squares_limits(
    weights: np.ndarray, channel_axes: tuple[int, ...], bits: int
) -> np.ndarray:
    """Returns the limit with the least mean squared quantization error for each output channel.

    The result broadcasts to the weights. A channel of zeros has the limit 1.
    """
    reduced = tuple(axis for axis in range(-weights.ndim, 0) if axis not in channel_axes)
    full = np.max(np.abs(weights), axis=reduced, keepdims=True)
    full = np.where(full > 0, full, np.float32(1))
    best, least = full, np.full(full.shape, np.inf)
    for factor in _FACTORS:
        limits = (full * factor).astype(np.float32)
        error = np.sum(
            (round_weights(weights, limits, bits) - weights) ** 2, reduced, keepdims=True
        )
        best, least = np.where(error < least, limits, best), np.minimum(error, least)
    return best


def round_weights(weights: np.ndarray, limits: np.ndarray, bits: int) -> np.ndarray:
    """Clips weights to limits and rounds them to the nearest of the 2^bits - 1 levels."""
    scale = limits / (2 ** (bits - 1) - 1)
    return np.round(np.clip(weights, -limits, limits) / scale) * scale


def clip_weights(model: keras.Model) -> None:
    """Clips the weights of a quantization-aware model to limits with the least squared error.

    In training, the limit of a channel is its largest absolute weight. It is lower after clipping.
    Weights with one range per tensor, as in `recipes.contrib`, do not change.
    """
    for weights, quantizer in list_channel_weights(model, are_variables=True):
        value = weights.numpy()
        limits = find_least_squares_limits(value, quantizer.channel_axes, quantizer.spec.bits)
        weights.assign(np.clip(value, -limits, limits))
        quantizer.set_limits(limits)


def start_limits(model: keras.Model) -> None:
    """Sets learned limits of weights to the limits with the least squared error."""
    for weights, quantizer in list_channel_weights(model):
        if quantizer.learned is not None:
            axes, bits = quantizer.channel_axes, quantizer.spec.bits
            quantizer.set_limits(find_least_squares_limits(weights.numpy(), axes, bits))


def list_channel_weights(
    model: keras.Model, are_variables: bool = False
) -> Iterator[tuple[Any, WeightQuantizer]]:
    """Yields (weight, quantizer) for each weight in a wrapper with one range per channel.

    With `are_variables`, only yields variables, and no kernels that are computed from variables.
    """
    for layer in list_scheduled_layers(model):
        if isinstance(layer, QuantizeWrapper) and not (
            are_variables and has_computed_kernel(layer.layer)
        ):
            for name, quantizer in layer.weight_quantizers.items():
                if quantizer.spec.per_channel and not isinstance(quantizer, CellQuantizer):
                    yield getattr(layer.layer, name), quantizer
