"""Converts models of Keras 3 to Keras 2, and copies the weights back.

Only this package uses internals of Keras 3. It imports Keras 3 only to convert a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.imports.keras3.backend import (
    Keras3Layer,
    Keras3Model,
    check_model,
    is_layer,
    is_model,
    is_of_keras_3,
    keras_3,
)
from keras_qat.imports.keras3.layers import convert_layer, find_counterpart
from keras_qat.imports.keras3.operations import call_operation
from keras_qat.keras2.backend import get_keras_mask, keras
from keras_qat.keras2.layers_and_models import list_nodes, list_weights
from keras_qat.messages import warn_caller

__all__ = ["as_keras_2", "from_keras_3", "give_weights"]


def from_keras_3(model: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Converts a Keras 3 model to an equivalent Keras 2 model with the same weights.

    Layers, names, nesting, inputs, outputs and `trainable` flags are the same. The model is not
    compiled. Operations on tensors (`x + y`, `keras.ops.relu(x)`) become layers.

    Args:
        model: a built Sequential or functional model of Keras 3 on TensorFlow. It is not changed.
        custom_objects: Keras 2 layer classes for Keras 3 classes that Keras 2 lacks, by the name of
            the Keras 3 class. Both classes need the same configuration and weights.

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
    _take_weights(converted, model)
    return converted


def as_keras_2(model: Any) -> Any:
    """Converts a Keras 3 model, with a warning. Returns a Keras 2 model unchanged."""
    if not is_of_keras_3(model):
        return model
    converted = from_keras_3(model)
    warn_caller(
        f"'{model.name}' is a model of Keras 3. keras_qat.from_keras_3 has converted it to "
        f"Keras 2. Compile and fit the result with {keras.__name__}; keras_qat.to_keras_3 copies "
        f"its weights back."
    )
    return converted


def _check_layers(model: Keras3Model, custom: Mapping[str, type]) -> None:
    unknown = {
        layer.name: type(layer).__name__
        for layer in _list_layers(model)
        if find_counterpart(layer, custom) is None
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


def _list_layers(layer: Keras3Layer) -> Iterator[Keras3Layer]:
    """Yield the layers of a model, including layers inside nested models and wrappers."""
    if not is_model(layer):
        yield layer
    inner = layer.layers if is_model(layer) else [getattr(layer, "layer", None)]
    for child in inner:
        if is_layer(child):
            yield from _list_layers(child)


class _Converter:
    """Converts models and layers. Shared layers stay shared.

    Args:
        custom: maps names of classes that Keras 2 lacks to replacements.
    """

    def __init__(self, custom: Mapping[str, type]) -> None:
        self._custom = custom
        self._converted: dict[int, Any] = {}

    def convert(self, layer: Keras3Layer) -> keras.layers.Layer:
        if id(layer) not in self._converted:
            if not is_model(layer):
                converted = convert_layer(layer, self._custom, self.convert)
            else:
                check_model(layer)
                is_sequential = isinstance(layer, keras_3().Sequential)
                converted = (
                    self._convert_sequential if is_sequential else self._convert_functional
                )(layer)
            self._converted[id(layer)] = converted
        return self._converted[id(layer)]

    def _convert_sequential(self, model: Keras3Model) -> keras.Model:
        layers = [_make_input(model.inputs[0]), *map(self.convert, model.layers)]
        return keras.Sequential(layers, name=model.name)

    def _convert_functional(self, model: Keras3Model) -> keras.Model:
        map_structure = keras_3().tree.map_structure
        inputs = map_structure(_make_input, model.input)
        tensors = dict(zip(map(id, model.inputs), tf.nest.flatten(inputs), strict=True))
        for node in list_nodes(model):
            outputs = tf.nest.flatten(self._call(node, tensors))
            for source, output in zip(node.outputs, outputs, strict=True):
                is_same = output.dtype == source.dtype
                tensors[id(source)] = output if is_same else tf.cast(output, source.dtype)
        outputs = map_structure(lambda tensor: tensors[id(tensor)], model.output)
        return keras.Model(inputs, outputs, name=model.name)

    def _call(self, node: Any, tensors: Mapping[int, Any]) -> Any:
        args, kwargs = node.arguments.fill_in(tensors)
        operation = node.operation
        if not is_layer(operation):
            dtypes = {tensor.dtype for tensor in (*node.arguments.keras_tensors, *node.outputs)}
            return call_operation(operation, args, kwargs, dtypes)
        added = _find_added_arguments(node)
        kwargs = {key: value for key, value in kwargs.items() if key not in added}
        try:
            return self.convert(operation)(*args, **kwargs)
        except (TypeError, NotImplementedError) as error:
            raise ValueError(
                f"Layer '{operation.name}' ({type(operation).__name__}) of Keras 3 cannot be "
                f"converted, because the call of the Keras 2 layer fails: {error}"
            ) from error


def _find_added_arguments(node: Any) -> set[str]:
    """Return the names of `training` and mask arguments that Keras 3 added to a call."""
    flatten = keras_3().tree.flatten
    carried = {id(get_keras_mask(tensor)) for tensor in node.arguments.keras_tensors}
    return {
        key
        for key, value in node.arguments.kwargs.items()
        if key == "training" or all(mask is None or id(mask) in carried for mask in flatten(value))
    }


def _make_input(tensor: Any) -> Any:
    layer = tensor._keras_history.operation
    if getattr(layer, "optional", False):
        raise ValueError(f"Input '{layer.name}' is optional, which Keras 2 does not support.")
    return keras.Input(
        batch_shape=tensor.shape, dtype=tensor.dtype, name=layer.name, sparse=tensor.sparse
    )


def give_weights(model: keras.Model, keras_3_model: Keras3Model) -> None:
    """Copies the weights of a Keras 2 model to the original Keras 3 model."""
    layers = list(_pair_layers(keras_3_model, model))
    weights = [pair for layer_pair in layers for pair in _pair_weights(*layer_pair)]
    for target, source in weights:
        target.assign(np.asarray(source))
    for layer, _ in layers:
        _finalize(layer)


def _take_weights(model: keras.Model, keras_3_model: Keras3Model) -> None:
    """Copy weights and `trainable` flags from a Keras 3 model to its Keras 2 counterpart."""
    for layer, converted in _pair_layers(keras_3_model, model):
        if converted.trainable != layer.trainable:
            converted.trainable = layer.trainable
        for source, target in _pair_weights(layer, converted):
            target.assign(np.asarray(source))
        _finalize(converted)


def _pair_layers(source: Keras3Layer, converted: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs (Keras 3 layer, Keras 2 layer). A model comes before its layers."""
    yield source, converted
    if not is_model(source):
        return
    counterparts = {layer.name: layer for layer in converted.layers}
    for layer in source.layers:
        counterpart = counterparts.get(layer.name)
        inner = getattr(layer, "layer", None)
        if counterpart is None and layer.weights:
            raise ValueError(
                f"'{converted.name}' lacks the layer '{layer.name}' of '{source.name}'."
            )
        if counterpart is not None and is_model(inner):  # The layer inside a TimeDistributed.
            yield layer, counterpart
            yield from _pair_layers(inner, counterpart.layer)
        elif counterpart is not None:
            yield from _pair_layers(layer, counterpart)


def _pair_weights(source: Keras3Layer, converted: keras.layers.Layer) -> list[tuple[Any, Any]]:
    """Return pairs (Keras 3 weight, Keras 2 weight) for a layer, or [] for a model."""
    if is_model(source) or is_model(getattr(source, "layer", None)):
        return []
    pair = source.weights, list_weights(converted)
    shapes = [[tuple(weight.shape) for weight in weights] for weights in pair]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The weights of layer '{source.name}' have the shapes {shapes[0]} in Keras 3 and "
            f"{shapes[1]} in Keras 2."
        )
    return list(zip(*pair, strict=True))


def _finalize(layer: Any) -> None:
    """Update the attributes that a Normalization computes from its weights."""
    if hasattr(layer, "finalize_state"):
        layer.finalize_state()
