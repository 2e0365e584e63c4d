"""Reads the operation of a call, such as "add", and finds tensors with a constant value.

A tensor or array is uniform if all its elements are equal, as in `tf.ones_like(x) * 2.0`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.facts import Facts
from keras_qat.graph.operations import get_kind, is_operation, list_arguments, read_array
from keras_qat.keras2.backend import keras, layers

LAYERS = {
    layers.Add: "add",
    layers.Subtract: "subtract",
    layers.Multiply: "multiply",
    layers.Maximum: "maximum",
    layers.Minimum: "minimum",
}

ACTIVATIONS = {
    keras.activations.exponential: "exp",
    keras.activations.sigmoid: "sigmoid",
    keras.activations.softplus: "softplus",
    keras.activations.tanh: "tanh",
    tf.nn.relu6: "relu6",
}

INVERSE = {"subtract": "add", "divide": "multiply"}
"""Operations that `simplify_operation` inverts. For example, `x - 2` becomes `x + -2`."""

FILLS = {"fill": 1, "broadcast_to": 0, "tile": 0, "cast": 0, "identity": 0}
"""Maps an operation that does not change values to the position of the argument with the values."""

CONSTANTS = {"zeros": 0.0, "zeros_like": 0.0, "ones": 1.0, "ones_like": 1.0}
"""Maps an operation to the value of all elements of its result."""

SUMS = {"add": operator.add, "subtract": operator.sub}

HIDES = -1e3
"""Values up to this one mask a score. Models add them to scores, or select them by `tf.where`."""


def read_operation(call: Call) -> tuple[str, list[Any]]:
    """Return the kind of a call's operation, and its operands.

    An `Add` layer has the kind "add", like `tf.add`. A Dense has the kind "".
    """
    layer = call.layer
    if is_operation(layer):
        kind, arguments = get_kind(call), list_arguments(call)
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
    """Read an operation. Return `x - 2` as `x + -2`, and `x / 2` as `x * 0.5`."""
    kind, operands = read_operation(call)
    if kind == "negative":
        return "multiply", [operands[0], -1.0]
    constant = read_array(operands[1]) if kind in INVERSE and len(operands) > 1 else None
    if constant is None or (kind == "divide" and not np.all(constant)):
        return kind, operands
    exact = constant.astype(np.float64)
    return INVERSE[kind], [operands[0], -exact if kind == "subtract" else 1.0 / exact]


class Uniform(NamedTuple):
    """The value of all elements of a tensor. For `x + -1e9`, it is approximately -1e9."""

    value: float
    is_exact: bool = True


def find_uniform(value: Value) -> Generator[Value, Any, Uniform | None]:
    """Find the value of a uniform tensor, such as `ones_like(x) * -1e9`. Called by `Facts.find`.

    Return None if the elements differ.
    """
    if value.producer is None:
        return None
    kind, operands = read_operation(value.producer)
    if kind in CONSTANTS:
        return Uniform(CONSTANTS[kind])
    if kind in FILLS:
        operands = [operands[FILLS[kind]]]
    elif kind not in ("multiply", "exp", *SUMS) or (kind != "multiply" and not value.is_float):
        return None
    terms: list[Uniform | None] = []
    for operand in operands:
        terms.append((yield operand) if isinstance(operand, Value) else measure_array(operand))
    exact = [term.value for term in terms if term is not None and term.is_exact]
    if kind in ("multiply", *FILLS) and len(exact) == len(terms):
        return Uniform(math.prod(exact))
    # Layers and arrays are ignored from here on. Otherwise zero states of cells would be folded.
    if kind in FILLS or not is_operation(value.producer.layer):
        return None
    pairs = list(zip(operands, terms, strict=True))
    terms = [term if isinstance(x, Value) or np.ndim(x) == 0 else None for x, term in pairs]
    values = [term.value for term in terms if term is not None]
    if kind == "multiply":
        return Uniform(0.0) if value.is_float and Uniform(0.0) in terms else None
    if kind == "exp":
        return Uniform(0.0) if values and values[0] <= HIDES else None
    if len(values) == len(exact) == 2:
        return Uniform(float(SUMS[kind](*values)))
    if len(values) != 1 or abs(values[0]) < -HIDES:
        return None
    is_negated = kind == "subtract" and terms[0] is None
    return Uniform(-values[0] if is_negated else values[0], is_exact=False)


def measure_array(argument: object) -> Uniform | None:
    """Return the value of a number or of a uniform array. Return None if elements differ."""
    values = read_array(argument)
    if values is None or not values.size or np.ptp(values) > 0:
        return None
    return Uniform(float(values.flat[0]))


def read_uniform(operand: object, facts: Facts) -> float | None:
    """Return the exact value of a uniform tensor, array or number. Return None if unknown."""
    if isinstance(operand, Value):
        uniform = facts.find(find_uniform, operand)
    else:
        uniform = measure_array(operand)
    return uniform.value if uniform is not None and uniform.is_exact else None
