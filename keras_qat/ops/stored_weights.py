"""Operators that return weights or constants, such as Embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.graph.calls import Call
from keras_qat.helper_layers.operations import Indices, OnGrid, WeightTensor
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import accept_float
from keras_qat.ops.op import Arguments, Attributes, Op, SharedRange, get_held_dtype
from keras_qat.ops.weights import map_rows

INDICES = ("int32", "int64")
"""Types of indices that GATHER supports. A CAST converts other types."""


def _store(values: np.ndarray, params: QuantParams) -> np.ndarray:
    """Add the zero point to quantized values, clip them, and convert them to the file's type."""
    return np.clip(values + params.zero_point, params.lowest, params.highest).astype(params.dtype)


def _prepare(a: Arguments) -> tuple[Any, Any]:
    """Return the embedding table, and the ratio of its scale to the output's scale."""
    return tf.convert_to_tensor(a.weights.q), tf.reshape(
        tf.cast(a.weights.scale, tf.float64), []
    ) / a.output.scale


def _compute(a: Arguments) -> tf.Tensor:
    (indices,), (table, ratio) = a.q, a.prepared
    if indices.dtype.name not in INDICES:
        indices = tf.cast(indices, tf.int32)
    entries = tf.cast(tf.gather(table, indices), tf.float64)
    return tf.cast(tf.round(entries * ratio), get_held_dtype(a.output))


def _emit(e: Emission) -> None:
    weights, params = e.weights, e.params
    (scale,) = np.asarray(weights.scale, np.float64).reshape(-1)
    ratio = scale / np.float64(params.scale)
    table = map_rows(lambda rows: _store(np.round(rows * ratio), params), np.asarray(weights.q))
    indices = e.inputs[0]
    if e.dtype(indices) not in INDICES:
        indices = e.temporary("indices", e.shape(indices), "int32")
        e.cast(e.inputs[0], indices)
    e.add("GATHER", [e.constant("table", table, params), indices], axis=0)


EMBEDDING = Op(
    "embedding",
    _compute,
    _emit,
    prepare=_prepare,
    doc="looks up rows in a table of weights, which is quantized like the output",
    layers=(layers.Embedding,),
    weights={"embeddings": ()},
    is_table=True,
)


def _emit_indices(e: Emission) -> None:
    add = e.builder.copy if e.dtype(e.inputs[0]) == "int32" else e.cast
    add(e.inputs[0], e.outputs[0])


INDICES_OF_REALS = Op(
    "indices",
    lambda a: tf.cast(a.q[0], tf.int32),
    _emit_indices,
    doc="converts float tensors that contain only integers, such as token ids, to integers",
    layers=(Indices,),
    is_table=True,
)


def _quantize(layer: OnGrid | WeightTensor, params: QuantParams) -> tf.Tensor:
    """Return a constant's quantized values relative to the zero point. They are not clipped."""
    return round_half_away(tf.cast(layer.value(), tf.float64) / params.scale)


def _weight(a: Arguments) -> tf.Tensor:
    if a.output is None:  # Integers need no quantization.
        return a.call.layer.value()
    return tf.cast(_quantize(a.call.layer, a.output), get_held_dtype(a.output))


def _accepts_weight(call: Call, attributes: Attributes) -> str | None:
    dtype = tf.as_dtype(call.output.dtype)
    return None if dtype.is_integer or dtype.is_bool else accept_float(call)


def _emit_weight(e: Emission) -> None:
    layer, params = e.node.call.layer, e.node.output.params
    if params is None:
        values = layer.value().numpy()
    else:
        values = _store(_quantize(layer, params.as_tensors()).numpy(), params)
    tensor = e.builder.graph.tensors[e.outputs[0]]
    tensor.buffer = e.builder.buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


WEIGHT_TENSOR = Op(
    "weight",
    _weight,
    _emit_weight,
    doc="a weight of a custom layer, or a value that it computes from weights only",
    layers=(WeightTensor,),
    accepts=_accepts_weight,
    reads_only_weights=True,
)


def _compute_on_grid(a: Arguments) -> tf.Tensor:
    output = a.output.as_tensors()
    low, high = (end - output.zero_point for end in (output.lowest, output.highest))
    q = tf.clip_by_value(_quantize(a.call.layer, output), low, high)
    return tf.cast(tf.reshape(q, a.call.output.shape), get_held_dtype(a.output))


ON_GRID = Op(
    "on_grid",
    _compute_on_grid,
    _emit_weight,
    doc="constants in a comparison, quantized like the other operand",
    output=SharedRange(rounds=True),
    layers=(OnGrid,),
    accepts=accept_float,
    is_constant=True,
)
