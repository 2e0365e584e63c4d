"""What keeps the converter from quantizing more than the plan says."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.flatbuffer.edit import code_of, drop_unread
from keras_qat.keras2.backend import mask_of, set_mask

__all__ = ["barrier", "remove_barriers"]


def barrier(x: Any) -> Any:
    """`x`, in a form behind which the converter quantizes nothing.

    It would put a layer in float between quantized tensors into integers, weights included, which
    training has not simulated. A cast and back is exact, and no folding removes it.
    """
    if x.dtype != tf.float32:
        return x
    y = tf.cast(tf.cast(x, tf.float64), tf.float32)
    set_mask(y, mask_of(x))
    return y


def remove_barriers(model: Any) -> None:
    """Takes the casts out of the converter's file, unpacked: microcontrollers have no float64."""
    for graph in model.subgraphs:
        casts = [each for each in graph.operators if code_of(model, each) == CAST]
        source = {int(each.outputs[0]): int(each.inputs[0]) for each in casts}
        types = [tensor.type for tensor in graph.tensors]
        instead = {
            back: source[there]
            for back, there in source.items()
            if there in source
            and [types[each] for each in (source[there], there, back)] == BARRIER
            and back not in graph.outputs
        }
        for operator in graph.operators:
            operator.inputs = [_origin(int(each), instead) for each in operator.inputs]
        drop_unread(model, graph, {CAST})


CAST = schema.BuiltinOperator.CAST

BARRIER = [
    schema.TensorType.FLOAT32,
    schema.TensorType.FLOAT64,
    schema.TensorType.FLOAT32,
]
"""Types of the tensors of a barrier. Other casts there and back compute something."""


def _origin(index: int, instead: dict[int, int]) -> int:
    while index in instead:
        index = instead[index]
    return index
