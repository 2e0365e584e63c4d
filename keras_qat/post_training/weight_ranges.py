"""Ranges of weights by the least squared error: numpy, no model."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_qat.layers import QuantizeWrapper
from keras_qat.schedule import scheduled_layers

__all__ = ["clip_weights", "least_squares_limits", "rounded"]

_FACTORS = np.linspace(1.0, 0.2, 81)
"""Limits that are tried, of the largest magnitude."""


def least_squares_limits(
    weights: np.ndarray, channel_axes: tuple[int, ...], bits: int
) -> np.ndarray:
    """The limit of each output channel with the smallest mean squared error of quantization.

    Shaped to broadcast against the weights. A channel of zeros has the limit 1.

    Args:
        weights: the weights.
        channel_axes: axes of the output channels, counted from the end.
        bits: 2 to 8.
    """
    reduced = tuple(axis for axis in range(-weights.ndim, 0) if axis not in channel_axes)
    full = np.max(np.abs(weights), axis=reduced, keepdims=True)
    full = np.where(full > 0, full, np.float32(1))
    best, least = full, np.full(full.shape, np.inf)
    for factor in _FACTORS:
        limits = (full * factor).astype(np.float32)
        error = np.sum((rounded(weights, limits, bits) - weights) ** 2, reduced, keepdims=True)
        best, least = np.where(error < least, limits, best), np.minimum(error, least)
    return best


def rounded(weights: np.ndarray, limits: np.ndarray, bits: int) -> np.ndarray:
    """Weights clipped to limits and rounded to the nearest of the 2^bits - 1 levels."""
    scale = limits / (2 ** (bits - 1) - 1)
    return np.round(np.clip(weights, -limits, limits) / scale) * scale


def clip_weights(model: Any) -> None:
    """Clips the weights of a quantization-aware model where that makes their rounding better.

    The range of a channel is that of its weights, so that this sets it, for training as well.
    Ranges of a whole tensor, as of `recipes.contrib`, stay.
    """
    for layer in scheduled_layers(model):
        if not isinstance(layer, QuantizeWrapper):
            continue
        for name, quantizer in layer.weight_quantizers.items():
            if quantizer.spec.per_channel:
                weights = getattr(layer.layer, name)
                value = weights.numpy()
                axes, bits = quantizer.channel_axes, quantizer.spec.bits
                limits = least_squares_limits(value, axes, bits)
                weights.assign(np.clip(value, -limits, limits))
