"""Channels of an output whose numbers are too small for the one range that all of them share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from keras_qat.analysis.verify.signal_to_noise import decibels
from keras_qat.analysis.verify.verdict import LOW_SQNR
from keras_qat.training.readiness import list_some

MOST_CHANNELS = 100
"""Channels of an output that are looked at; with more they are classes of one kind."""

FEW_NUMBERS = 32
"""Numbers of a channel that are too few to tell what it holds otherwise."""

DROWNED_PART = 1 / 32
"""Part of a range that holds 8 of its 256 levels."""


def small_channels(outputs: Iterable[tuple[str, np.ndarray, np.ndarray]]) -> list[str]:
    """Says which outputs hold parts that their range drowns, as scores beside boxes in pixels.

    Args:
        outputs: name, what the model computes in float, and what it computes quantized, of each.
    """
    causes = []
    for name, in_float, quantized in outputs:
        channels = in_float.shape[-1] if in_float.ndim > 1 else 0
        full_range = np.ptp(in_float)
        if not 1 < channels <= MOST_CHANNELS or full_range <= 1:  # Of probabilities all are small.
            continue
        if in_float.size < FEW_NUMBERS * channels:
            continue
        drowned = [
            channel
            for channel in range(channels)
            if np.abs(in_float[..., channel]).max() < DROWNED_PART * full_range
            and _is_drowned(in_float[..., channel], quantized[..., channel])
        ]
        if 0 < len(drowned) < channels:
            causes.append(
                f"the values in channels {list_some([str(channel) for channel in drowned])} of the "
                f"{channels} channels of '{name}' are too small for the range that all channels "
                f"share. Scale the channels alike, or export the tensors before they are "
                f"concatenated: quantize_model(model, outputs=[...]). plan(model) lists their "
                f"names."
            )
    return causes


def _is_drowned(exact: np.ndarray, values: np.ndarray) -> bool:
    """Whether a channel has a signal, and a low ratio of it to the noise."""
    ratio = decibels(exact, values)
    return ratio is not None and ratio < LOW_SQNR
