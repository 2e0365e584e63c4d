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


EARLY: dict[str, Expansion] = {
    "frame": _frame,
    **{
        operation.__name__: multiply_by_matrix(operation)
        for operation in (
            *(tf.signal.dct, tf.signal.idct),
            tf.signal.mfccs_from_log_mel_spectrograms,
        )
    },
}
