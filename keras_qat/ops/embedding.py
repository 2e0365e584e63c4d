"""Rows of a table: GATHER."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.qparams import QuantParams
from keras_qat.keras2.backend import keras
from keras_qat.ops.op import Arguments, Example, Op
from keras_qat.ops.quantize import requantized
from keras_qat.resolved.weights import Weights
from keras_qat.tflite.builder import TYPES
from keras_qat.tflite.emission import Emission
from keras_qat.tflite.names import SCOPE

__all__ = ["EMBEDDING"]

_layers = keras.layers

INDICES = ("int32", "int64")
"""Types of indices that GATHER takes; others are converted."""


def _params(weights: Weights, output: QuantParams) -> QuantParams:
    """Those of the table: the output's, if it has their scale, or symmetric ones of 8 bits."""
    (scale,) = np.asarray(weights.scale).reshape(-1)
    if np.float32(scale) == np.float32(output.scale):
        return output
    return QuantParams(np.float32(scale), 0)


def _compute(a: Arguments) -> Any:
    """Rows of a table that holds quantized values less the zero point, of the output or of 0."""
    weights: Weights = a.weights
    scale = tf.reshape(tf.cast(weights.scale, tf.float64), [])
    (indices,) = a.q
    if indices.dtype.name not in INDICES:
        indices = tf.cast(indices, tf.int32)
    dtype = tf.float64 if a.output.bits == 16 else tf.float32
    table = weights.q
    if isinstance(table, np.ndarray):
        table = tf.constant(table.astype(dtype.as_numpy_dtype))
    rows = tf.cast(tf.gather(table, indices), dtype)
    return requantized(a.family, rows, QuantParams(scale, 0.0), a.output)


def _emit(e: Emission) -> None:
    weights, output = e.node.weights, e.node.output
    assert weights is not None and output.params is not None
    params = _params(weights, output.params)
    table = (np.asarray(weights.q) + params.zero_point).astype(params.dtype)
    tensor = e.builder.graph.tensors[e.inputs[0]]
    (indices,) = e.inputs
    if tensor.type not in [TYPES[each] for each in INDICES]:
        indices = e.builder.tensor(f"{SCOPE}/{e.node.name}/indices", e.shape(indices), "int32")
        types = {"inDataType": tensor.type, "outDataType": TYPES["int32"]}
        e.add("CAST", e.inputs, [indices], "CastOptions", **types)
    end = e.outputs[0]
    if params != output.params:
        end = e.builder.tensor(
            f"{SCOPE}/{e.node.name}/rows", output.shape, params.dtype.name, params
        )
    e.add("GATHER", [e.constant("table", table, params), indices], [end], "GatherOptions", axis=0)
    if end != e.outputs[0]:
        e.add("QUANTIZE", [end], options="QuantizeOptions")


def _example(numbers: np.random.Generator) -> Example:
    layer = _layers.Embedding(int(numbers.integers(3, 40)), int(numbers.integers(1, 7)))
    rank = int(numbers.integers(0, 3))
    return Example(layer, ((4, 5)[:rank],), (str(numbers.choice(["int32", "int64", "uint8"])),))


EMBEDDING = Op(
    "embedding",
    _compute,
    _emit,
    doc="rows of a table of weights",
    layers=(_layers.Embedding,),
    weights={"embeddings": ()},
    example=_example,
)
