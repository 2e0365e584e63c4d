"""States that a recurrent layer keeps from one call to the next, as kernels read and write them.

They are the layer's own variables, with real numbers, which training and `reset_states` share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.qparams import QuantParams

__all__ = ["keep", "kept"]


def kept(layer: Any, params: Sequence[QuantParams]) -> list[Any]:
    """The states of a layer as quantized values less their zero points, in int64.

    A layer that has just been trained has states between the quantized ones.
    """
    found = []
    for state, each in zip(layer.states, params, strict=True):
        q = tf.cast(tf.round(tf.cast(state, tf.float64) / each.scale), tf.int64)
        ends = (tf.cast(end - each.zero_point, tf.int64) for end in (each.lowest, each.highest))
        found.append(tf.clip_by_value(q, *ends))
    return found


def keep(layer: Any, params: Sequence[QuantParams], states: Sequence[Any], result: Any) -> Any:
    """A result, once the layer has kept such states."""
    done = [
        variable.assign(
            tf.cast(tf.cast(q, tf.float64) * each.scale, variable.dtype), read_value=False
        )
        for variable, q, each in zip(layer.states, states, params, strict=True)
    ]
    with tf.control_dependencies(done):
        return tf.identity(result)
