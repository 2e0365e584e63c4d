"""Reads the arguments of TensorFlow operations that were called on symbolic tensors."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import is_operation
from keras_qat.keras2.backend import keras


@functools.cache
def operation_class() -> type:
    """Returns the class of the layers that Keras makes of TensorFlow's operations."""
    return type(tf.abs(keras.Input((1,)))._keras_history.layer)


def get_operands(call: Call, *names: str) -> list[Any]:
    """Returns arguments of a call by name; None for those that are not given.

    Functions of TensorFlow 1 with other names understand those of TensorFlow 2.
    """
    function = call.layer.function if is_operation(call.layer) else type(call.layer).call
    positional = zip(_parameters(function), call.args, strict=False)
    given = {**dict(positional), **call.kwargs}
    aliases = ((name, *OTHER_NAMES.get(name, ())) for name in names)
    return [next((x for x in map(given.get, same) if x is not None), None) for same in aliases]


def get_argument(call: Call, name: str) -> Any:
    """Returns the argument of a call with a name; None if it is not given."""
    return get_operands(call, name)[0]


OTHER_NAMES = {
    "dilations": ("rate", "dilation_rate"),
    "filters": ("filter",),
    "indices": ("ids",),
    "input": ("value",),
    "strides": ("stride",),
    "x": ("self",),
    "y": ("other",),
}
"""Name of an argument -> its names in other functions of the same kind."""


CANONICAL_NAMES = {other: name for name, others in OTHER_NAMES.items() for other in others}

CHANNELS_LAST = ("NWC", "NHWC", "NDHWC")


def bind_arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """Returns the first argument of an operation, and the others by their names in TensorFlow 2.

    Without its name, and without what is not given or has its default value.
    """
    signature = _signature(call.layer.function)
    args, kwargs = list[Any](), dict[str, Any]()
    for name, value in signature.bind(*call.args, **call.kwargs).arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs.update(value)
        elif not args:
            args.append(value)
        elif not _is_default(value, parameter.default):
            kwargs[CANONICAL_NAMES.get(name, name)] = value
    kwargs.pop("name", None)
    return args, kwargs


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(value, str) and value in CHANNELS_LAST:
        return True
    is_plain = isinstance(value, (bool, int, float, str)) and type(value) is type(default)
    return value is None or (is_plain and value == default)


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


@functools.cache
def _parameters(function: Any) -> tuple[str, ...]:
    names = inspect.signature(function).parameters
    is_method = "self" in names and "other" not in names  # `x == y` is a function of both.
    return tuple(names)[is_method:]


def arguments_in_order(call: Call) -> list[Any]:
    """Returns what an operation is given but for its name, in the order of its function."""
    given: dict[Any, Any] = dict(enumerate(call.args))
    if call.kwargs:
        given = inspect.signature(call.layer.function).bind(*call.args, **call.kwargs).arguments
        given.pop("name", None)
    return list(given.values())


def read_scalar(leaf: Any) -> float | None:
    """Returns an argument that is a scalar as a float; None for any other."""
    if tf.is_tensor(leaf):
        leaf = tf.get_static_value(leaf)
    if not isinstance(leaf, (int, float, np.number, np.ndarray)) or isinstance(leaf, bool):
        return None
    return float(leaf) if np.ndim(leaf) == 0 and np.asarray(leaf).dtype.kind in "iuf" else None


def read_array(leaf: Any) -> np.ndarray | None:
    """Returns a numeric argument as an array; None for any other."""
    if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable):
        leaf = tf.get_static_value(leaf)
    if isinstance(leaf, (list, tuple)) and leaf:  # As Keras saves arrays.
        leaves = tf.nest.flatten(leaf)
        leaf = np.asarray(leaf) if all(read_scalar(item) is not None for item in leaves) else None
    is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iuf"
    return leaf if is_array else None if read_scalar(leaf) is None else np.asarray(leaf)


def inputs_and_constants(call: Call) -> list[Any]:
    """Returns the tensors (`Value`s) and constants (arrays) among a call's arguments, in order."""
    operands: list[Any] = []
    for argument in (*call.args, *call.kwargs.values()):
        constant = None if isinstance(argument, Value) else read_array(argument)
        leaves = tf.nest.flatten(argument) if constant is None else [constant]
        known = [leaf if isinstance(leaf, Value) else read_array(leaf) for leaf in leaves]
        operands += [leaf for leaf in known if leaf is not None]
    return operands
