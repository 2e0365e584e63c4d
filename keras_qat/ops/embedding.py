"""Rows of a table: GATHER."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.keras2.backend import keras
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Op
from keras_qat.tflite.schema import TYPES

__all__ = ["EMBEDDING"]

_layers = keras.layers

INDICES = ("int32", "int64")
"""Types of indices that GATHER takes; others are converted."""


def _rounded(make: Any, q: Any, ratio: Any) -> Any:
    """Entries of a table as the file holds them: in the output's parameters, less the zero point.

    Those that have its scale already stay as they are.
    """
    return make.round(q * ratio)


def _prepare(a: Arguments) -> tuple[Any, Any]:
    """The table, and its scale over the output's."""
    table = a.weights.q
    if isinstance(table, np.ndarray):  # A constant of the graph.
        table = tf.constant(table.astype(np.float32))
    return table, tf.reshape(tf.cast(a.weights.scale, tf.float64), []) / a.output.scale


def _compute(a: Arguments) -> Any:
    (indices,), (table, ratio) = a.q, a.numbers
    if indices.dtype.name not in INDICES:
        indices = tf.cast(indices, tf.int32)
    rows = _rounded(tf, tf.cast(tf.gather(table, indices), tf.float64), ratio)
    return rows if a.output.bits == 16 else tf.cast(rows, tf.float32)


def _emit(e: Emission) -> None:
    weights, params = e.weights, e.node.output.params
    assert params is not None
    (scale,) = np.asarray(weights.scale, np.float64).reshape(-1)
    table = _rounded(np, np.asarray(weights.q, np.float64), scale / np.float64(params.scale))
    table = np.clip(table + params.zero_point, params.lowest, params.highest).astype(params.dtype)
    indices, tensor = e.inputs[0], e.builder.graph.tensors[e.inputs[0]]
    if tensor.type not in [TYPES[each] for each in INDICES]:
        indices = e.temporary("indices", e.shape(indices), "int32")
        e.add("CAST", e.inputs, [indices], inDataType=tensor.type, outDataType=TYPES["int32"])
    e.add("GATHER", [e.constant("table", table, params), indices], axis=0)


EMBEDDING = Op(
    "embedding",
    _compute,
    _emit,
    prepare=_prepare,
    doc="rows of a table of weights, which is held in the parameters of the output",
    layers=(_layers.Embedding,),
    weights={"embeddings": ()},
    is_table=True,
)
