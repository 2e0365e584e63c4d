"""Expands operations of `tf.signal` on floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.lowering.expand_call import Expansion, require
from keras_qat.lowering.expansions.matrices import multiply_by_matrix


def _frame(
    signal: tf.Tensor,
    frame_length: int,
    frame_step: int,
    pad_end: bool = False,
    pad_value: Any = 0,
    axis: Any = -1,
) -> tf.Tensor:
    size = signal.shape[axis]
    require(not pad_end and size is not None)
    starts = np.arange(0, size - frame_length + 1, frame_step)
    return tf.gather(signal, starts[:, None] + np.arange(frame_length), axis=axis)


def _overlap_and_add(signal: tf.Tensor, frame_step: int) -> tf.Tensor:
    """Add frames in pieces of `frame_step` values, each shifted to its place."""
    (count, size), step = signal.shape[-2:], int(frame_step)
    rank = len(signal.shape)
    require(rank > 2 and None not in signal.shape[1:])
    parts, outer = -(-size // step), [-1, *signal.shape[1:-2]]
    beside = [(0, 0)] * (rank - 2)
    signal = tf.pad(signal, [*beside, (0, 0), (0, parts * step - size)])
    total: tf.Tensor = 0
    for part in range(parts):
        piece = signal[..., part * step : (part + 1) * step]
        total += tf.pad(piece, [*beside, (part, parts - 1 - part), (0, 0)])
    y = tf.reshape(total, [*outer, (count + parts - 1) * step])
    return y[..., : (count - 1) * step + size]


EARLY: dict[str, Expansion] = {
    "frame": _frame,
    "overlap_and_add": _overlap_and_add,
    **{
        operation.__name__: multiply_by_matrix(operation)
        for operation in (
            *(tf.signal.dct, tf.signal.idct),
            tf.signal.mfccs_from_log_mel_spectrograms,
        )
    },
}
