"""Reads a Sequential or functional model as a graph.

Each call of a layer becomes a `Call`. Each tensor becomes a `Value`. Nested models are flattened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values, split_loss_only
from keras_qat.helper_layers.operations import CarryMask
from keras_qat.keras2.backend import KerasTensor, get_keras_mask, is_symbolic, keras, make_input
from keras_qat.keras2.layers_and_models import (
    accepts_training,
    bind_options,
    get_nested_inputs,
    get_nested_outputs,
    list_nodes,
)
from keras_qat.keras2.readability import check_readable, is_graph_model


def read_model(model: keras.Model) -> Graph:
    """Reads a built Sequential or functional model.

    Raises:
        ValueError: if the model cannot be read, or has tensors without elements.
    """
    check_readable(model)
    return _Reader(model).read()


class _Reader:
    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.tensors: dict[int, Value] = {}
        self.masks: dict[Value, Any] = {}
        """Maps a value to a symbolic Keras mask. Only the mask's shape and dtype are used."""
        self.calls: list[Call] = []
        self.counts: Counter[Any] = Counter()

    def read(self) -> Graph:
        model = self.model
        inputs = tf.nest.map_structure(
            lambda x: self._add_value(x, x._keras_history.layer.name), get_nested_inputs(model)
        )
        outputs = self._read_calls(model, flatten_values(inputs), "", None)
        if empty := [value.name for value in self.tensors.values() if 0 in value.shape[1:]]:
            raise ValueError(
                f"'{model.name}' has tensors without elements, which TFLite cannot compute: "
                f"{', '.join(dict.fromkeys(empty))}. Remove the layers that compute them."
            )
        calls, loss_only = split_loss_only(self.calls, outputs)
        names = list(model.output_names)
        return Graph(model.name, inputs, outputs, names, calls, loss_only=loss_only)

    def _read_calls(
        self, model: keras.Model, inputs: Iterable[Value], path: str, training: bool | None
    ) -> Any:
        """Add the calls of a model to `self.calls`. Return the outputs of the model."""
        self._keep(model.inputs, inputs)
        for node in list_nodes(model):
            given = node.call_args, dict(node.call_kwargs)
            args, kwargs = tf.nest.map_structure(self._find_value, given)
            args = tuple(map(_restore_constants, args))
            layer, name = node.layer, path + node.layer.name
            args, kwargs = bind_options(layer, args, kwargs)
            if isinstance(layer, keras.layers.InputLayer):
                # The call returns its input. Keras could not load a file with the call.
                self._keep([node.outputs], flatten_values((args, kwargs)))
                continue
            if is_graph_model(layer):
                inner = kwargs.get("training")
                flat = layer._flatten_to_reference_inputs(args[0] if args else kwargs["inputs"])
                if kwargs.get("mask") is not None:
                    pairs = zip(flat, tf.nest.flatten(kwargs["mask"]), strict=True)
                    flat = [self._carry_mask(value, mask, name) for value, mask in pairs]
                phase = training if inner is None else inner
                outputs = self._read_calls(layer, flat, f"{name}/", phase)
                self._keep(tf.nest.flatten(node.outputs), flatten_values(outputs))
                continue
            if training is not None and kwargs.get("training") is None and accepts_training(layer):
                kwargs["training"] = training
            self.counts[layer] += 1
            names = _name_outputs(name, self.counts[layer], node.outputs)
            symbols = tf.nest.flatten(node.outputs)
            # Inside a nested model, symbolic tensors lack masks from the outer model.
            masks = _compute_output_masks(layer, args, kwargs, self.masks) if path else []
            masks += [None] * (len(symbols) - len(masks))
            flat = list(map(self._add_value, symbols, names, masks))
            self._keep([x for x in symbols if not _is_none(x)], flatten_values(flat))
            outputs = tf.nest.pack_sequence_as(node.outputs, flat)
            self.calls.append(Call(layer, args, kwargs, outputs, name))
        return tf.nest.map_structure(self._find_value, get_nested_outputs(model))

    def _add_value(self, tensor: KerasTensor, name: str, mask: Any = None) -> Value | None:
        if _is_none(tensor):
            return None
        mask = get_keras_mask(tensor) if mask is None else mask
        if tensor.shape.rank is None:
            raise ValueError(
                f"The output of layer '{name}' of '{self.model.name}' has an unknown number of "
                f"axes. Set its shape in the layer: x = tf.ensure_shape(x, (None, ...))."
            )
        value = Value(name, tuple(tensor.shape), tensor.dtype.name, masked=mask is not None)
        if value.masked:
            self.masks[value] = mask
        return value

    def _find_value(self, leaf: Any) -> Any:
        return self.tensors.get(id(leaf), leaf) if is_symbolic(leaf) else leaf

    def _keep(self, symbols: Iterable[KerasTensor], values: Iterable[Value]) -> None:
        self.tensors.update(zip(map(id, symbols), values, strict=True))

    def _carry_mask(self, value: Value, mask: Value | None, path: str) -> Value:
        """Return a copy of `value` with the mask that a nested model at `path` is called with."""
        if mask is None:
            return value
        self.counts[path] += 1
        layer = CarryMask(name=f"masked_{self.counts[path]}", dtype=value.dtype)
        name = f"{path}/{layer.name}"
        masked = Value(name, value.shape, value.dtype, masked=True)
        self.calls.append(Call(layer, (value,), {"mask": mask}, masked, name))
        self.masks[masked] = mask
        return masked


def _compute_output_masks(
    layer: keras.layers.Layer, args: Any, kwargs: dict[str, Any], masks: Mapping[Value, Any]
) -> list[Any]:

    def make_like(tensor: Any) -> KerasTensor | None:
        return None if tensor is None else make_input(tensor.shape, tensor.dtype)

    first = args[0] if args else next(iter(kwargs.values()))
    read = map_values(lambda value: make_like(masks.get(value)), first)
    if (given := kwargs.get("mask")) is not None:
        read = map_values(make_like, given)
    if not layer.supports_masking or all(mask is None for mask in tf.nest.flatten(read)):
        return []
    return tf.nest.flatten(layer.compute_mask(map_values(make_like, first), read))


def _restore_constants(argument: Any) -> Any:
    """Convert lists of scalar tensors, which Keras creates from constants, back to constants."""
    is_list = isinstance(argument, (list, tuple)) and len(argument) > 0
    leaves = tf.nest.flatten(argument) if is_list else [None]
    if not all(isinstance(leaf, tf.__internal__.EagerTensor) and not leaf.ndim for leaf in leaves):
        return argument
    array = np.asarray(tf.nest.map_structure(lambda leaf: leaf.numpy(), argument))
    return array.tolist() if array.ndim == 1 else array


def _is_none(symbol: KerasTensor) -> bool:
    """Return True for the symbolic tensor that Keras creates if a layer returns None."""
    return not hasattr(symbol.type_spec, "shape")


def _name_outputs(name: str, call_number: int, outputs: object) -> list[str]:
    """Return names for the outputs of a call, such as "lstm:0" or "lstm#2:0" (second call)."""
    label = f"{name}#{call_number}" if call_number > 1 else name
    count = len(tf.nest.flatten(outputs))
    return [label] if count == 1 else [f"{label}:{index}" for index in range(count)]


def list_symbols(model: keras.Model) -> dict[str, KerasTensor]:
    """Returns the symbolic tensors of a model by name, except tensors inside nested models."""
    tensors: dict[str, KerasTensor] = {}
    counts: Counter[Any] = Counter()
    for node in list_nodes(model):
        counts[node.layer] += 1
        names = _name_outputs(node.layer.name, counts[node.layer], node.outputs)
        tensors.update(zip(names, tf.nest.flatten(node.outputs), strict=True))
    return tensors
