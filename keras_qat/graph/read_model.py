"""Reads a Sequential or functional model as a graph.

There is one `Call` for each time that a layer is called, and a `Value` for each tensor. Nested
models are flattened, and a shared layer appears once for each of its calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values, split_loss_only
from keras_qat.graph.loadable_config import as_one_array
from keras_qat.graph.rebuild_model import make_input
from keras_qat.helper_layers.operations import CarryMask
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import (
    accepts_training,
    bind_options,
    get_nested_inputs,
    get_nested_outputs,
    list_nodes,
)
from keras_qat.keras2.readability import check_readable, is_graph_model


def read_model(model: Any) -> Graph:
    """Reads a built Sequential or functional model.

    Raises:
        ValueError: if the model cannot be read, or has tensors without elements.
    """
    check_readable(model)
    tensors: dict[int, Value] = {}
    masks: dict[Value, Any] = {}
    """Value that carries a mask -> a tensor or a value of that mask's shape and type."""

    def new_value(tensor: Any, name: str, mask: Any = None) -> Value | None:
        if _is_none(tensor):
            return None
        mask = backend.get_keras_mask(tensor) if mask is None else mask
        if tensor.shape.rank is None:
            raise ValueError(
                f"The number of axes of the output of layer '{name}' of '{model.name}' is not "
                f"known. Set its shape in the layer: x = tf.ensure_shape(x, (None, ...))."
            )
        value = Value(name, tuple(tensor.shape), tensor.dtype.name, masked=mask is not None)
        if value.masked:
            masks[value] = mask
        return value

    def value_of(leaf: Any) -> Any:
        return tensors.get(id(leaf), leaf) if hasattr(leaf, "_keras_history") else leaf

    inputs = tf.nest.map_structure(
        lambda tensor: new_value(tensor, tensor._keras_history.layer.name), get_nested_inputs(model)
    )

    def keep(symbols: Iterable[Any], values: Iterable[Value]) -> None:
        tensors.update(zip(map(id, symbols), values, strict=True))

    calls: list[Call] = []
    counts: Counter[Any] = Counter()

    def with_mask(value: Value, mask: Value | None, path: str) -> Value:
        """Returns a value that carries the mask with which a nested model is called."""
        if mask is None:
            return value
        counts[path] += 1
        layer = CarryMask(name=f"masked_{counts[path]}", dtype=value.dtype)
        name = f"{path}/{layer.name}"
        masked = Value(name, value.shape, value.dtype, masked=True)
        calls.append(Call(layer, (value,), {"mask": mask}, masked, name))
        masks[masked] = mask
        return masked

    def trace(model: Any, inputs: Iterable[Value], path: str, training: Any) -> Any:
        keep(model.inputs, inputs)
        for node in list_nodes(model):
            args, kwargs = tf.nest.map_structure(value_of, (node.call_args, dict(node.call_kwargs)))
            args = tuple(map(as_one_array, args))
            layer, name = node.layer, path + node.layer.name
            args, kwargs = bind_options(layer, args, kwargs)
            if isinstance(layer, keras.layers.InputLayer):
                # It passes its input on. Keras cannot load a file with such a call.
                keep([node.outputs], flatten_values((args, kwargs)))
                continue
            if is_graph_model(layer):
                inner = kwargs.get("training")
                flat = layer._flatten_to_reference_inputs(args[0] if args else kwargs["inputs"])
                if kwargs.get("mask") is not None:
                    given = zip(flat, tf.nest.flatten(kwargs["mask"]), strict=True)
                    flat = [with_mask(value, mask, name) for value, mask in given]
                outputs = trace(layer, flat, f"{name}/", training if inner is None else inner)
                keep(tf.nest.flatten(node.outputs), flatten_values(outputs))
                continue
            if training is not None and kwargs.get("training") is None and accepts_training(layer):
                kwargs["training"] = training
            counts[layer] += 1
            labels = iter(_output_names(name, counts[layer], node.outputs))
            handed = iter(_masks_handed_on(layer, args, kwargs, masks) if path else ())
            outputs = tf.nest.map_structure(
                lambda tensor, labels=labels, handed=handed: new_value(
                    tensor, next(labels), next(handed, None)
                ),
                node.outputs,
            )
            known = [symbol for symbol in tf.nest.flatten(node.outputs) if not _is_none(symbol)]
            keep(known, flatten_values(outputs))
            calls.append(Call(layer, args, kwargs, outputs, name))
        return tf.nest.map_structure(value_of, get_nested_outputs(model))

    outputs = trace(model, flatten_values(inputs), "", None)
    needed, loss_only = split_loss_only(calls, outputs)
    if empty := [value.name for value in tensors.values() if 0 in value.shape[1:]]:
        raise ValueError(
            f"'{model.name}' has tensors without elements, which TFLite cannot compute: "
            f"{', '.join(dict.fromkeys(empty))}. Take these layers out."
        )
    return Graph(model.name, inputs, outputs, list(model.output_names), needed, loss_only=loss_only)


def _masks_handed_on(layer: Any, args: Any, kwargs: Any, masks: Mapping[Value, Any]) -> list[Any]:
    """Returns the masks of a call's outputs that come from those of its inputs.

    Of a nested model Keras' own symbolic tensors do not tell: its masks come from outside.
    """
    first = args[0] if args else next(iter(kwargs.values()))
    like = lambda tensor: None if tensor is None else make_input(tensor.shape, tensor.dtype)  # noqa: E731
    given = kwargs.get("mask")
    read = map_values(lambda value: like(masks.get(value)), first)
    read = read if given is None else map_values(like, given)
    if not layer.supports_masking or all(mask is None for mask in tf.nest.flatten(read)):
        return []
    return tf.nest.flatten(layer.compute_mask(map_values(like, first), read))


def _is_none(symbol: Any) -> bool:
    """Returns whether an output stands for None, which some layers return beside tensors."""
    return not hasattr(symbol.type_spec, "shape")


def _output_names(name: str, call_number: int, outputs: Any) -> list[str]:
    """Returns the names of a call's outputs: that of the layer, marked by call and by output."""
    label = f"{name}#{call_number}" if call_number > 1 else name
    count = len(tf.nest.flatten(outputs))
    return [label] if count == 1 else [f"{label}:{index}" for index in range(count)]


def list_symbols(model: Any) -> dict[str, Any]:
    """Returns the symbolic tensors of a model without nested ones, by the names `read` gives."""
    tensors: dict[str, Any] = {}
    counts: Counter[Any] = Counter()
    for node in list_nodes(model):
        counts[node.layer] += 1
        names = _output_names(node.layer.name, counts[node.layer], node.outputs)
        tensors.update(zip(names, tf.nest.flatten(node.outputs), strict=True))
    return tensors
