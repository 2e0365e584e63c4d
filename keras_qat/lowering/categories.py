"""Keras' layers that sort numbers into bins and encode categories, in operations with kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.ops.composed import NO_WIDE


def binned(layer: Any, x: Any) -> Any:
    """Computes `Discretization`: a value's bin is as high as the boundaries that it reaches."""
    boundaries = np.asarray(layer.bin_boundaries, np.float32)
    if layer.sparse or not boundaries.size or NO_WIDE:
        raise NotImplementedError
    reached = tf.cast(x[..., None] >= boundaries, tf.float32)
    below, above = reached[..., :-1], reached[..., 1:]
    parts = [1.0 - reached[..., :1], *([below - above] if boundaries.size > 1 else [])]
    codes = tf.concat([*parts, reached[..., -1:]], -1)
    if layer.output_mode == "int":
        return tf.argmax(codes, -1, layer.compute_dtype)
    return _together(codes, layer.output_mode)


def encoded(layer: Any, x: Any) -> Any:
    """Computes `CategoryEncoding` of indices."""
    if layer.sparse:
        raise NotImplementedError
    return _together(tf.one_hot(x, layer.num_tokens), layer.output_mode)


def _together(codes: Any, mode: str) -> Any:
    """Returns codes of ones and zeros for each category, or one of all that an example has."""
    if mode == "one_hot":
        return tf.squeeze(codes, -2) if codes.shape[-2] == 1 else codes
    return {"multi_hot": tf.reduce_max, "count": tf.reduce_sum}[mode](codes, -2)
