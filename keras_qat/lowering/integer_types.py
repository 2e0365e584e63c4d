"""Integers of 64 bits that constants bring into a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import kind_of
from keras_qat.graph.tf_operations import operands
from keras_qat.lowering.builder import LoweringContext, PartsBuilder

TYPED = {
    **dict.fromkeys(("tile", "repeat", "broadcast_to"), ("input",)),
    "gather": ("params",),
    "fill": ("value",),
    "where": ("x", "y"),
}
"""Operation -> the arguments that have the type of its result."""


def with_int32_constants(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers an operation on constants of int64, as NumPy makes them, to int32 and a cast.

    Keras saves constants without their type, and reads integers as int32.
    """
    layer = call.layer
    if kind_of(layer) not in TYPED or call.output.dtype != "int64":
        return []
    if any(isinstance(x, Value) for x in operands(call, *TYPED[kind_of(layer)])):
        return []
    parts, operation = PartsBuilder(call, context), type(layer)
    args, kwargs = tf.nest.map_structure(_narrow, (call.args, dict(call.kwargs)))
    narrow = parts.new("int32", operation, layer.function)
    output = Value(f"{call.name}_int32", call.output.shape, "int32")
    y = parts.add(narrow, *args, kwargs=kwargs, output=output)
    return parts.end(parts.new("", operation, tf.cast), y, kwargs={"dtype": "int64"})


def _narrow(leaf: Any) -> Any:
    is_array = isinstance(leaf, (np.ndarray, np.integer)) or tf.is_tensor(leaf)
    if not is_array or np.asarray(leaf).dtype != np.int64:
        return leaf
    return np.asarray(leaf).astype(np.int32)
