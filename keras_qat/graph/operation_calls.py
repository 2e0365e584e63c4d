"""Calls of TensorFlow's operations as layers whose configuration holds all arguments.

Keras' own layers of operations lose the tensors of `tf.einsum`, the right side of `!=`, and more.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.graph.operations import is_operation
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.keras2.backend import keras, register


@register
class OperationCall(keras.layers.Layer):
    """Calls an operation on a list of tensors.

    Args:
        operation: Keras' layer of the operation, or its configuration.
        arguments: positional and named arguments in JSON, with the tensors' numbers.
    """

    def __init__(self, operation: Any, arguments: str, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        is_layer = isinstance(operation, keras.layers.Layer)
        self.operation = operation if is_layer else keras.layers.deserialize(operation)
        self.arguments = arguments

    def call(self, inputs: Any) -> Any:
        args, kwargs = _decoded(json.loads(self.arguments), tf.nest.flatten(inputs))
        return self.operation.call(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        operation = keras.layers.serialize(self.operation)
        return {**super().get_config(), "operation": operation, "arguments": self.arguments}


def call_in_layer(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Computes the outputs of a call; those of an operation with an `OperationCall`."""
    if not is_operation(call.layer):
        return call.layer(*args, **kwargs)
    tensors: list[Any] = []
    arguments = json.dumps(_encoded([args, kwargs], tensors))
    return OperationCall(call.layer, arguments, name=call.layer.name)(tensors)


def copy_with_all_arguments(model: Any) -> Any:
    """Returns a model of the same calls, whose configuration holds all arguments of operations."""
    return rebuild_model(read_model(model), apply=call_in_layer)


def _encoded(argument: Any, tensors: list[Any]) -> Any:
    """Returns what JSON holds of an argument, and adds the symbolic tensors in it to a list."""
    if hasattr(argument, "_keras_history"):
        tensors.append(argument)
        return {"tensor": len(tensors) - 1}
    if argument is Ellipsis:
        return {"ellipsis": True}
    if isinstance(argument, tf.DType):
        return {"type": argument.name}
    if isinstance(argument, dict):
        return {"dict": {key: _encoded(item, tensors) for key, item in argument.items()}}
    if isinstance(argument, (list, tuple)):
        return [_encoded(item, tensors) for item in argument]
    if isinstance(argument, (complex, np.ndarray, np.generic)) or tf.is_tensor(argument):
        array = np.asarray(argument)
        parts = [array.real, array.imag] if np.iscomplexobj(array) else [array]
        return {"array": [part.tolist() for part in parts], "dtype": array.dtype.name}
    return argument


def _decoded(value: Any, tensors: list[Any]) -> Any:
    """Returns the argument that was encoded, with other tensors."""
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        real, *imaginary = map(np.asarray, value["array"])
        return (real + 1j * imaginary[0] if imaginary else real).astype(value["dtype"])
    if "dict" in value:
        return {key: _decoded(item, tensors) for key, item in value["dict"].items()}
    if "tensor" in value:
        return tensors[value["tensor"]]
    return Ellipsis if "ellipsis" in value else tf.as_dtype(value["type"])
