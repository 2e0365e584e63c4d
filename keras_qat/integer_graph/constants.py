"""Quantized constants of operations."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.ops.node import Constant


def constant_of(values: np.ndarray, bits: int, params: QuantParams | None = None) -> Constant:
    """Quantizes constant numbers, over their own range and zero unless parameters are given.

    Args:
        values: the numbers.
        bits: bits of the tensors they are computed with; 16 makes an int16 constant.
        params: parameters to use, as for an operator whose inputs and output share them.
    """
    values = np.asarray(values, np.float32)
    if params is None:
        low, high = (float(bound(values, initial=0.0)) for bound in (np.min, np.max))
        if bits == 16:
            largest = max(-low, high) or 1.0
            params = QuantParams(np.float32(largest / 32767), 0, 16)
        else:
            scale = (high - low) / 255 or 1.0
            params = QuantParams(np.float32(scale), -128 + int(np.rint(-low / scale)))
    if tf.is_tensor(params.scale):  # The graph reads ranges whenever it runs.
        scaled = tf.constant(values, tf.float64) / params.scale + params.zero_point
        q = tf.clip_by_value(round_half_away(scaled), params.lowest, params.highest)
        return Constant(q, params)
    scaled = values.astype(np.float64) / np.float64(params.scale) + params.zero_point
    away = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    return Constant(np.clip(away, params.lowest, params.highest).astype(params.dtype), params)
