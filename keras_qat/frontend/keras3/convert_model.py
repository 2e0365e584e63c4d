"""From a model of Keras 3 to the same in Keras 2."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from keras_qat.frontend.keras2.backend import keras, mask_of
from keras_qat.frontend.keras3.backend import (
    check_model,
    is_layer,
    is_model,
    is_of_keras_3,
    keras_3,
    nodes,
)
from keras_qat.frontend.keras3.layers import convert_layer, counterpart
from keras_qat.frontend.keras3.operations import call_operation
from keras_qat.frontend.keras3.weights import take_weights

__all__ = ["as_keras_2", "from_keras_3"]


def from_keras_3(model: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Makes the Keras 2 model that computes what a model of Keras 3 does, with its weights.

    It has the layers, names, nesting, inputs and outputs of the Keras 3 model, and its `trainable`
    flags; compile it anew. Operations on tensors (`x + y`, `keras.ops.relu(x)`) become layers.

    Args:
        model: a built Sequential or functional model of Keras 3, on TensorFlow. It is not changed.
        custom_objects: Keras 2 layer classes in place of those that Keras 2 lacks, by the names of
            the Keras 3 classes. They take the same configuration, and have the same weights.

    Returns:
        The Keras 2 model, not compiled.

    Raises:
        ImportError: if there is no Keras 3.
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
    """The model itself; of one of Keras 3 what `from_keras_3` makes, with a warning about it."""
    if not is_of_keras_3(model):
        return model
    converted = from_keras_3(model)
    warnings.warn(
        f"'{model.name}' is a model of Keras 3: what is quantized is the Keras 2 model that "
        f"keras_qat.from_keras_3 makes of it. Compile and fit that one with {keras.__name__}; "
        f"keras_qat.to_keras_3 brings its weights back.",
        stacklevel=3,
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
        f"for Keras 2, with the same get_config() and the same weights, and give them as "
        f"keras_qat.from_keras_3(model, custom_objects={{'{example}': ...}}); or build the model "
        f"without them."
    )


def _layers(layer: Any) -> Iterator[Any]:
    """The layers in a model, in models and wrappers in it too."""
    if not is_model(layer):
        yield layer
    inner = layer.layers if is_model(layer) else [getattr(layer, "layer", None)]
    for each in inner:
        if is_layer(each):
            yield from _layers(each)


class _Converter:
    """Converts layers, each once: shared layers stay shared.

    Args:
        custom: what is made of classes that Keras 2 lacks, by their names.
    """

    def __init__(self, custom: Mapping[str, Any]) -> None:
        self._custom = custom
        self._made: dict[int, Any] = {}

    def convert(self, layer: Any) -> Any:
        """The layer or model of Keras 2 that stands for one of Keras 3."""
        if id(layer) not in self._made:
            if is_model(layer):
                check_model(layer)
                sequential = isinstance(layer, keras_3().Sequential)
                made = self._sequential(layer) if sequential else self._functional(layer)
            else:
                made = convert_layer(layer, self._custom, self.convert)
            self._made[id(layer)] = made
        return self._made[id(layer)]

    def _sequential(self, model: Any) -> Any:
        layers = [_input(model.inputs[0]), *map(self.convert, model.layers)]
        return keras.Sequential(layers, name=model.name)

    def _functional(self, model: Any) -> Any:
        structure = keras_3().tree.map_structure
        inputs = structure(_input, model.input)
        tensors = dict(zip(map(id, model.inputs), tf.nest.flatten(inputs), strict=True))
        for node in nodes(model):
            outputs = tf.nest.flatten(self._call(node, tensors))
            for theirs, ours in zip(node.outputs, outputs, strict=True):
                same = ours.dtype == theirs.dtype
                tensors[id(theirs)] = ours if same else tf.cast(ours, theirs.dtype)
        outputs = structure(lambda tensor: tensors[id(tensor)], model.output)
        return keras.Model(inputs, outputs, name=model.name)

    def _call(self, node: Any, tensors: Mapping[int, Any]) -> Any:
        """The outputs of a call, of tensors of Keras 2."""
        args, kwargs = node.arguments.fill_in(tensors)
        operation = node.operation
        if not is_layer(operation):
            dtypes = {tensor.dtype for tensor in (*node.arguments.keras_tensors, *node.outputs)}
            return call_operation(operation, args, kwargs, dtypes)
        own = _by_itself(node)
        kwargs = {key: each for key, each in kwargs.items() if key not in own}
        try:
            return self.convert(operation)(*args, **kwargs)
        except (TypeError, NotImplementedError) as error:
            raise ValueError(
                f"Layer '{operation.name}' ({type(operation).__name__}) of Keras 3 cannot be "
                f"converted: Keras 2 does not take this call of it: {error}"
            ) from error


def _by_itself(node: Any) -> set[str]:
    """The arguments of a layer's call that Keras 3 added to those that were given.

    They are the phase, which the model's own overrides, and the masks that its tensors carry.
    """
    structure = keras_3().tree.flatten
    carried = {id(mask_of(tensor)) for tensor in node.arguments.keras_tensors}
    return {
        key
        for key, value in node.arguments.kwargs.items()
        if key == "training"
        or all(each is None or id(each) in carried for each in structure(value))
    }


def _input(tensor: Any) -> Any:
    """An input of a model as one of Keras 2."""
    layer = tensor._keras_history.operation
    if getattr(layer, "optional", False):
        raise ValueError(f"Input '{layer.name}' is optional, which Keras 2 does not know.")
    return keras.Input(
        batch_shape=tensor.shape, dtype=tensor.dtype, name=layer.name, sparse=tensor.sparse
    )
