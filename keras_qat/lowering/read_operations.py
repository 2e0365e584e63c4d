"""Reads what a call computes, whether it is of a TensorFlow function or of a Keras layer."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.facts import Facts
from keras_qat.graph.operations import arguments_in_order, get_kind, is_operation, read_array
from keras_qat.keras2.backend import keras, layers

LAYERS = {
    layers.Add: "add",
    layers.Subtract: "subtract",
    layers.Multiply: "multiply",
    layers.Maximum: "maximum",
    layers.Minimum: "minimum",
}
"""Layer class -> the kind of operation that it stands for."""

ACTIVATIONS = {
    keras.activations.exponential: "exp",
    keras.activations.sigmoid: "sigmoid",
    keras.activations.softplus: "softplus",
    keras.activations.tanh: "tanh",
    tf.nn.relu6: "relu6",
}
"""Activation function -> the kind of operation that it is."""

INVERSE = {"subtract": "add", "divide": "multiply"}
"""Operation -> the operation that computes the same with the inverse of a constant."""

FILLS = {"fill": 1, "broadcast_to": 0, "tile": 0, "cast": 0, "identity": 0}
"""Operation that holds one of its arguments everywhere -> the position of that argument."""


def read_operation(call: Call) -> tuple[str, list[Any]]:
    """Return the kind of operation that a call computes, and its arguments in order.

    A layer that stands for an operation is of its kind. The kind of other layers is "".
    """
    layer = call.layer
    if is_operation(layer):
        kind, arguments = get_kind(call), arguments_in_order(call)
        keys = tf.nest.flatten(arguments[1:]) if kind == "getitem" else []
        is_new_axis = keys and all(key is None or key is Ellipsis for key in keys)
        return "expand_dims" if is_new_axis else kind, arguments
    if type(layer) is layers.Rescaling and not np.any(layer.offset):
        return "multiply", [*call.inputs, layer.scale]
    if type(layer) is layers.ReLU:
        is_relu6 = (layer.max_value, layer.negative_slope, layer.threshold) == (6, 0, 0)
        return "relu6" if is_relu6 else "", call.inputs
    if type(layer) is layers.Activation:
        kinds = (kind for function, kind in ACTIVATIONS.items() if function is layer.activation)
        return next(kinds, ""), call.inputs
    return LAYERS.get(type(layer), ""), call.inputs


def simplify_operation(call: Call) -> tuple[str, list[Any]]:
    """Return the same as `read_operation`, but x - 2 as x + -2, x / 2 as x * 0.5, -x as x * -1."""
    kind, operands = read_operation(call)
    if kind == "negative":
        return "multiply", [operands[0], -1.0]
    constant = read_array(operands[1]) if kind in INVERSE and len(operands) > 1 else None
    if constant is None or (kind == "divide" and not np.all(constant)):
        return kind, operands
    exact = constant.astype(np.float64)
    return INVERSE[kind], [operands[0], -exact if kind == "subtract" else 1.0 / exact]


def find_uniform(operand: Any, facts: Facts) -> float | None:
    """Return the number that an argument holds everywhere; None if it is not known.

    Args:
        operand: a number, an array, or a tensor such as `tf.ones_like(x) * -1e9`.
        facts: keeps answers.
    """
    if isinstance(operand, Value):
        return facts.find(_find_uniform, operand)
    values = read_array(operand)
    if values is None or not values.size or np.ptp(values) > 0:
        return None
    return float(values.flat[0])


def _find_uniform(value: Value) -> Generator[Value, Any, float | None]:
    kind, operands = read_operation(value.producer) if value.producer else ("", [])
    if kind in ("zeros", "zeros_like", "ones", "ones_like"):
        return float(kind in ("ones", "ones_like"))
    factors = [operands[FILLS[kind]]] if kind in FILLS else operands if kind == "multiply" else []
    product = 1.0 if factors else None
    for factor in factors:
        number = (yield factor) if isinstance(factor, Value) else find_uniform(factor, Facts())
        if number is None or product is None:
            return None
        product *= number
    return product
