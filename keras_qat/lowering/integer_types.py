"""Integers of 64 bits that constants bring into a model."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import get_kind, get_operands, read_array
from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.expand_call import expand_call, is_tensor

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
    if get_kind(layer) not in TYPED or call.output.dtype != "int64":
        return []
    if any(isinstance(x, Value) for x in get_operands(call, *TYPED[get_kind(layer)])):
        return []
    return expand_call(call, functools.partial(_compute_in_int32, call), context)


def _compute_in_int32(call: Call, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = tf.nest.map_structure(_narrow, (args, kwargs))
    return tf.cast(call.layer.function(*args, **kwargs), tf.int64)


def _narrow(leaf: Any) -> Any:
    values = None if is_tensor(leaf) or isinstance(leaf, int) else read_array(leaf)
    return leaf if values is None or values.dtype != np.int64 else values.astype(np.int32)
