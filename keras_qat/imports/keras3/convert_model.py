"""Converts a model of Keras 3 to Keras 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from keras_qat.imports.keras3.backend import (
    check_model,
    is_layer,
    is_model,
    is_of_keras_3,
    keras_3,
)
from keras_qat.imports.keras3.layers import convert_layer, counterpart
from keras_qat.imports.keras3.operations import call_operation
from keras_qat.imports.keras3.weights import take_weights
from keras_qat.keras2.backend import get_keras_mask, keras
from keras_qat.keras2.layers_and_models import list_nodes
from keras_qat.messages import warn_caller


def from_keras_3(model: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Makes a Keras 2 model that computes what a Keras 3 model does, with its weights.

    Layers, names, nesting, inputs, outputs and `trainable` flags are the same. The model is not
    compiled. Operations on tensors (`x + y`, `keras.ops.relu(x)`) become layers.

    Args:
        model: a built Sequential or functional model of Keras 3 on TensorFlow. It is not changed.
        custom_objects: name of a Keras 3 class that Keras 2 lacks -> a Keras 2 layer class with the
            same configuration and weights.

    Returns:
        The Keras 2 model.

    Raises:
        ImportError: if Keras 3 is not installed.
        ValueError: if the model cannot be read, or has layers or options that Keras 2 lacks.

    Example:
        >>> model = keras_qat.from_keras_3(keras.applications.MobileNetV2())
        >>> qat = keras_qat.quantize_model(model)
    """
    check_model(model)
    custom = dict(custom_objects or {})
    _check_layers(model, custom)
    converted = _Converter(custom).convert(model)
    take_weights(converted, model)
    return converted


def as_keras_2(model: Any) -> Any:
    """Returns a Keras 2 model as it is; converts one of Keras 3, with a warning."""
    if not is_of_keras_3(model):
        return model
    converted = from_keras_3(model)
    warn_caller(
        f"'{model.name}' is a model of Keras 3. keras_qat.from_keras_3 converts it to Keras 2 "
        f"before it is quantized. Compile and fit the result with {keras.__name__}; "
        f"keras_qat.to_keras_3 copies its weights back."
    )
    return converted


def _check_layers(model: Any, custom: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that lists the layers for which Keras 2 has no counterpart."""
    unknown = {
        layer.name: type(layer).__name__
        for layer in _layers(model)
        if counterpart(layer, custom) is None
    }
    if not unknown:
        return
    listed = "\n".join(f"  {name}: {kind}" for name, kind in unknown.items())
    example = next(iter(unknown.values()))
    raise ValueError(
        f"'{model.name}' has layers for which Keras 2 has no class:\n{listed}\nWrite each class "
        f"for Keras 2, with the same get_config() and the same weights, and pass them: "
        f"keras_qat.from_keras_3(model, custom_objects={{'{example}': ...}}). Or build the model "
        f"without them."
    )


def _layers(layer: Any) -> Iterator[Any]:
    """Yields the layers in a model, also inside nested models and wrappers."""
    if not is_model(layer):
        yield layer
    inner = layer.layers if is_model(layer) else [getattr(layer, "layer", None)]
    for child in inner:
        if is_layer(child):
            yield from _layers(child)


class _Converter:
    """Converts each layer once, so that shared layers stay shared.

    Args:
        custom: name of a class that Keras 2 lacks -> the class to use.
    """

    def __init__(self, custom: Mapping[str, Any]) -> None:
        self._custom = custom
        self._converted: dict[int, Any] = {}

    def convert(self, layer: Any) -> Any:
        """Returns the Keras 2 layer or model for one of Keras 3."""
        if id(layer) not in self._converted:
            if is_model(layer):
                check_model(layer)
                sequential = isinstance(layer, keras_3().Sequential)
                converted = self._sequential(layer) if sequential else self._functional(layer)
            else:
                converted = convert_layer(layer, self._custom, self.convert)
            self._converted[id(layer)] = converted
        return self._converted[id(layer)]

    def _sequential(self, model: Any) -> Any:
        layers = [_input(model.inputs[0]), *map(self.convert, model.layers)]
        return keras.Sequential(layers, name=model.name)

    def _functional(self, model: Any) -> Any:
        structure = keras_3().tree.map_structure
        inputs = structure(_input, model.input)
        tensors = dict(zip(map(id, model.inputs), tf.nest.flatten(inputs), strict=True))
        for node in list_nodes(model):
            outputs = tf.nest.flatten(self._call(node, tensors))
            for source, output in zip(node.outputs, outputs, strict=True):
                same = output.dtype == source.dtype
                tensors[id(source)] = output if same else tf.cast(output, source.dtype)
        outputs = structure(lambda tensor: tensors[id(tensor)], model.output)
        return keras.Model(inputs, outputs, name=model.name)

    def _call(self, node: Any, tensors: Mapping[int, Any]) -> Any:
        """Returns the outputs of a node for tensors of Keras 2."""
        args, kwargs = node.arguments.fill_in(tensors)
        operation = node.operation
        if not is_layer(operation):
            dtypes = {tensor.dtype for tensor in (*node.arguments.keras_tensors, *node.outputs)}
            return call_operation(operation, args, kwargs, dtypes)
        added = _added_arguments(node)
        kwargs = {key: value for key, value in kwargs.items() if key not in added}
        try:
            return self.convert(operation)(*args, **kwargs)
        except (TypeError, NotImplementedError) as error:
            raise ValueError(
                f"Layer '{operation.name}' ({type(operation).__name__}) of Keras 3 cannot be "
                f"converted: the Keras 2 layer cannot be called in the same way: {error}"
            ) from error


def _added_arguments(node: Any) -> set[str]:
    """Names the arguments of a layer's call that Keras 3 added: the phase, and masks of tensors."""
    flatten = keras_3().tree.flatten
    carried = {id(get_keras_mask(tensor)) for tensor in node.arguments.keras_tensors}
    return {
        key
        for key, value in node.arguments.kwargs.items()
        if key == "training" or all(mask is None or id(mask) in carried for mask in flatten(value))
    }


def _input(tensor: Any) -> Any:
    """Makes a Keras 2 input for an input of a Keras 3 model."""
    layer = tensor._keras_history.operation
    if getattr(layer, "optional", False):
        raise ValueError(f"Input '{layer.name}' is optional, which Keras 2 does not support.")
    return keras.Input(
        batch_shape=tensor.shape, dtype=tensor.dtype, name=layer.name, sparse=tensor.sparse
    )
