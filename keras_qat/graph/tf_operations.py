"""Reads the arguments of TensorFlow operations that were called on symbolic tensors."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.keras2.backend import keras


@functools.cache
def operation_class() -> type:
    """Returns the class of the layers that Keras makes of TensorFlow's operations."""
    return type(tf.abs(keras.Input((1,)))._keras_history.layer)


def operands(call: Call, *names: str) -> list[Any]:
    """Returns an operation's arguments in the order of `names`, None for those not given."""
    positional = list(call.args) + [None] * (len(names) - len(call.args))
    return [
        call.kwargs.get(name, default) for name, default in zip(names, positional, strict=False)
    ]


def arguments_in_order(call: Call) -> list[Any]:
    """Returns what an operation is given but for its name, in the order of its function."""
    given: dict[Any, Any] = dict(enumerate(call.args))
    if call.kwargs:
        given = inspect.signature(call.layer.function).bind(*call.args, **call.kwargs).arguments
        given.pop("name", None)
    return list(given.values())


def number(leaf: Any) -> float | None:
    """Returns an argument that is a scalar as a float; None for any other."""
    if tf.is_tensor(leaf):
        leaf = tf.get_static_value(leaf)
    if not isinstance(leaf, (int, float, np.number, np.ndarray)) or isinstance(leaf, bool):
        return None
    return float(leaf) if np.ndim(leaf) == 0 and np.asarray(leaf).dtype.kind in "iuf" else None


def array(leaf: Any) -> np.ndarray | None:
    """Returns a numeric argument as an array; None for any other."""
    if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable):
        leaf = tf.get_static_value(leaf)
    if isinstance(leaf, (list, tuple)) and leaf:  # As Keras saves arrays.
        leaves = tf.nest.flatten(leaf)
        leaf = np.asarray(leaf) if all(number(item) is not None for item in leaves) else None
    is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iuf"
    return leaf if is_array else None if number(leaf) is None else np.asarray(leaf)


def inputs_and_constants(call: Call) -> list[Any]:
    """Returns the tensors (`Value`s) and constants (arrays) among a call's arguments, in order."""
    operands: list[Any] = []
    for argument in (*call.args, *call.kwargs.values()):
        constant = None if isinstance(argument, Value) else array(argument)
        leaves = tf.nest.flatten(argument) if constant is None else [constant]
        known = [leaf if isinstance(leaf, Value) else array(leaf) for leaf in leaves]
        operands += [leaf for leaf in known if leaf is not None]
    return operands
