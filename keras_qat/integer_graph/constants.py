"""Constants of operations, quantized as kernels read them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.ops.node import Constant


def constant_of(values: np.ndarray, bits: int, params: QuantParams | None = None) -> Constant:
    """Numbers as quantized values: 256 of them over their range and zero, or in given parameters.

    Args:
        values: the numbers.
        bits: of the tensors that they are computed with; with 16 they are held in int16.
        params: those that they have to have, as an operator's that keeps its inputs' parameters.
    """
    values = np.asarray(values, np.float32)
    if params is None:
        low, high = (float(each(values, initial=0.0)) for each in (np.min, np.max))
        if bits == 16:
            largest = max(-low, high) or 1.0
            params = QuantParams(np.float32(largest / 32767), 0, 16)
        else:
            scale = (high - low) / 255 or 1.0
            params = QuantParams(np.float32(scale), -128 + int(np.rint(-low / scale)))
    if tf.is_tensor(params.scale):  # In a graph that reads ranges whenever it runs.
        scaled = tf.constant(values, tf.float64) / params.scale + params.zero_point
        q = tf.clip_by_value(round_half_away(scaled), params.lowest, params.highest)
        return Constant(q, params)
    scaled = values.astype(np.float64) / np.float64(params.scale) + params.zero_point
    away = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    return Constant(np.clip(away, params.lowest, params.highest).astype(params.dtype), params)
