"""`tf.boolean_mask` by constants, and by what is the same for each example, for `equivalents`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import kind_of
from keras_qat.graph.size_expressions import example_of
from keras_qat.graph.tf_operations import number, operands
from keras_qat.keras2.backend import keras
from keras_qat.lowering.written_out import copies, require


def boolean_mask(tensor: Any, mask: Any, name: Any = None, axis: Any = 0) -> Any:
    mask = np.asarray(mask)
    require(mask.ndim > 0 and mask.dtype == bool and number(axis) is not None and axis > 0)
    before, after = tensor.shape[1:axis], tensor.shape[axis + mask.ndim :]
    if mask.ndim > 1:
        require(None not in (*before, *after))
        tensor = tf.reshape(tensor, [-1, *before, mask.size, *after])
    return tf.gather(tensor, np.flatnonzero(mask), axis=axis)


def chosen_of_each(call: Call) -> tuple[Callable[..., Any], Call] | None:
    """Returns `tf.boolean_mask` by a mask that is the same for each example, and its call."""
    if kind_of(call) != "boolean_mask":
        return None
    x, mask, axis = operands(call, "tensor", "mask", "axis")
    example = example_of(mask) if isinstance(mask, Value) else None
    if example is None or not example.ndim or None in x.shape[1:] or axis or not x.is_float:
        return None
    rest = x.shape[1 + example.ndim :]

    def choose(tensor: Any) -> Any:
        rows = tf.reshape(tensor, [-1, example.size, *rest])
        return tf.reshape(tf.gather(rows, np.flatnonzero(example), axis=1), [-1, *rest])

    def operation(tensor: Any) -> Any:
        return tf.boolean_mask(tensor, np.stack([example] * len(tensor)))

    layer = keras.layers.Lambda(operation, name=call.layer.name)
    return choose, Call(layer, (x,), {}, copies(call), call.name)
