"""Creates Keras models and configurations from graphs.

Keras does not save all arguments of TensorFlow operations. For example, it loses the tensors of
`tf.einsum`. An `OperationCall` saves them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values, split_loss_only
from keras_qat.graph.operations import KINDS, NAMES, is_operation
from keras_qat.graph.read_model import read_model
from keras_qat.helper_layers.operations import Contract
from keras_qat.keras2.backend import KerasTensor, Node, is_symbolic, keras, make_input, register
from keras_qat.keras2.layers_and_models import (
    get_nested_inputs,
    get_nested_outputs,
    list_nodes,
    note_names,
)

_Model = keras.Model

_ADDED: dict[str, Callable[[Any, Any, Any], None]] = {
    "AddLoss": lambda model, layer, tensor: model.add_loss(tensor),
    "AddMetric": lambda model, layer, tensor: model.add_metric(
        tensor, layer.metric_name, aggregation=layer.aggregation
    ),
}
"""Maps Keras' layer classes to functions that add the layer's loss or metric to a model."""

Apply = Callable[[Call, Any, dict[str, Any]], Any]
"""A function `(call, args, kwargs) -> outputs` that computes a call."""


def _call_layer(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    return call.layer(*args, **kwargs)


def rebuild_model(
    graph: Graph, model_class: Callable[..., keras.Model] = _Model, apply: Apply = _call_layer
) -> keras.Model:
    """Creates a model from a graph. `apply` computes each call. The default calls the layer."""
    inputs = map_values(lambda x: make_input(x.shape, x.dtype, x.name), graph.inputs)
    tensors = dict(zip(flatten_values(graph.inputs), tf.nest.flatten(inputs), strict=True))
    _compute(graph.calls, tensors, apply)
    outputs = map_values(tensors.__getitem__, graph.outputs)
    model = model_class(inputs=inputs, outputs=outputs, name=graph.name)
    added = {call: _ADDED.get(type(call.layer).__name__) for call in graph.loss_only}
    _compute([call for call, add in added.items() if not add], tensors, apply)
    for call, add in added.items():
        if add:
            add(model, call.layer, tensors[call.inputs[0]])
    return model


def evaluate_graph(graph: Graph, inputs: list[tf.Tensor], apply: Apply = _call_layer) -> Any:
    """Computes the outputs of a graph for a flat list of inputs."""
    tensors = dict(zip(flatten_values(graph.inputs), inputs, strict=True))
    last_consumers = {value: call for call in graph.calls for value in call.inputs}
    outputs = set(flatten_values(graph.outputs))
    for call in graph.calls:
        _compute([call], tensors, apply)
        for value in set(call.inputs) - outputs:
            if last_consumers[value] is call:  # Frees memory in eager execution.
                del tensors[value]
    return map_values(tensors.__getitem__, graph.outputs)


def _compute(calls: list[Call], tensors: dict[Value, Any], apply: Apply) -> None:
    for call in calls:
        args, kwargs = map_values(tensors.__getitem__, (call.args, call.kwargs))
        outputs = tf.nest.flatten(call.outputs), tf.nest.flatten(apply(call, args, kwargs))
        tensors.update(zip(*outputs, strict=True))


class InsertedCall(NamedTuple):
    """A call to insert between a value's producer and its consumers."""

    layer: Any
    name: str
    kwargs: dict[str, Any]


class Replacement(NamedTuple):
    """A layer that computes the outputs of a call, instead of the call's own layer.

    Args:
        layer: the layer.
        reads: the call whose arguments are passed to `layer`. For example, one layer may replace a
            BatchNormalization and the Conv2D before it. `reads` is then the call of the Conv2D.
    """

    layer: Any
    reads: Call


def copy_graph(
    graph: Graph,
    replacements: Mapping[Call, Replacement],
    inserted: Mapping[Value, list[InsertedCall]],
    output_calls: Mapping[Value, InsertedCall],
) -> Graph:
    """Copies a graph. Replaces calls and inserts calls in the copy.

    Args:
        graph: the graph.
        replacements: maps calls to replacements, in topological order. Other calls are dropped.
        inserted: maps values to calls to insert before all consumers.
        output_calls: maps values to calls to insert only before the model's outputs.
    """
    calls: list[Call] = []
    current: dict[Value, Value] = {}
    """Maps a value of `graph` to its copy, or to the output of the last call inserted after it."""

    def copy(value: Value, dtype: str | None = None) -> Value:
        current[value] = Value(value.name, value.shape, dtype or value.dtype)
        return current[value]

    def insert_after(value: Value, insertion: InsertedCall) -> None:
        layer, name, kwargs = insertion
        source = current[value]
        calls.append(Call(layer, (source,), kwargs, copy(value), name))

    def finish(values: object) -> None:
        for value in flatten_values(values):
            for insertion in inserted[value]:
                insert_after(value, insertion)

    # Floating-point inputs become float32, as in exported files.
    inputs = map_values(lambda value: copy(value, value.inference_dtype), graph.inputs)
    finish(graph.inputs)
    for call, (layer, reads) in replacements.items():
        args, kwargs = map_values(current.__getitem__, (reads.args, reads.kwargs))
        calls.append(Call(layer, args, kwargs, map_values(copy, call.outputs), layer.name))
        finish(call.outputs)
    for value, insertion in output_calls.items():
        insert_after(value, insertion)
    outputs = map_values(current.__getitem__, graph.outputs)
    needed, loss_only = split_loss_only(calls, outputs)
    return Graph(graph.name, inputs, outputs, graph.output_names, needed, loss_only=loss_only)


def find_used_inputs(nested: Any, outputs: object) -> Any:
    """Returns the symbolic inputs that `outputs` depend on, in a list or dict like `nested`."""
    graph = read_model(keras.Model(nested, outputs))
    used = {*flatten_values([graph.outputs, *(call.inputs for call in graph.calls)])}
    flat = list(zip(tf.nest.flatten(nested), flatten_values(graph.inputs), strict=True))
    kept = {id(x) for x, value in flat if value in used}
    if isinstance(nested, dict) and len(nested) == len(flat):
        return {key: x for key, x in nested.items() if id(x) in kept}
    if isinstance(nested, (list, tuple)) and len(nested) == len(flat):
        return [x for x in nested if id(x) in kept]
    return nested


@register
class OperationCall(keras.layers.Layer):
    """Calls a TensorFlow operation on a list of tensors, and saves all arguments.

    Args:
        operation: Keras' layer of the operation, or the configuration of this layer.
        arguments: positional and named arguments in JSON. `{"tensor": 0}` is the first tensor.
    """

    def __init__(
        self, operation: keras.layers.Layer | dict[str, Any], arguments: str, **kwargs: object
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        is_config = isinstance(operation, dict)
        layer: Any = keras.layers.deserialize(operation) if is_config else operation
        self.operation = layer
        self.arguments = arguments

    def call(self, inputs: list[tf.Tensor]) -> Any:
        args, kwargs = _decode(json.loads(self.arguments), tf.nest.flatten(inputs))
        return self.operation.call(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        operation = keras.layers.serialize(self.operation)
        return {**super().get_config(), "operation": operation, "arguments": self.arguments}


def call_in_layer(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls the layer of `call`, or a new `OperationCall` if the layer is an operation."""
    if not is_operation(call.layer):
        return call.layer(*args, **kwargs)
    tensors: list[KerasTensor] = []
    arguments = json.dumps(_encode([args, kwargs], tensors))
    return OperationCall(call.layer, arguments, name=call.layer.name)(tensors)


def copy_with_all_arguments(model: keras.Model) -> keras.Model:
    """Returns a copy of a model. An `OperationCall` replaces each operation."""
    return rebuild_model(read_model(model), apply=call_in_layer)


def _encode(argument: Any, tensors: list[KerasTensor]) -> Any:
    """Convert an argument to JSON types. Append symbolic tensors to `tensors`."""
    if is_symbolic(argument):
        tensors.append(argument)
        return {"tensor": len(tensors) - 1}
    if argument is Ellipsis:
        return {"ellipsis": True}
    if isinstance(argument, tf.DType):
        return {"type": argument.name}
    if isinstance(argument, dict):
        return {"dict": {key: _encode(item, tensors) for key, item in argument.items()}}
    if isinstance(argument, (list, tuple)):
        return [_encode(item, tensors) for item in argument]
    if isinstance(argument, (complex, np.ndarray, np.generic)) or tf.is_tensor(argument):
        array = np.asarray(argument)
        components = [array.real, array.imag] if np.iscomplexobj(array) else [array]
        return {"array": [x.tolist() for x in components], "dtype": array.dtype.name}
    return argument


def _decode(value: Any, tensors: list[tf.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        real, *imaginary = map(np.asarray, value["array"])
        return (real + 1j * imaginary[0] if imaginary else real).astype(value["dtype"])
    if "dict" in value:
        return {key: _decode(item, tensors) for key, item in value["dict"].items()}
    if "tensor" in value:
        return tensors[value["tensor"]]
    return Ellipsis if "ellipsis" in value else tf.as_dtype(value["type"])


def get_functional_config(model: keras.Model) -> dict[str, Any]:
    """Returns the functional configuration of a model. `keras.Model.from_config` accepts it."""
    inputs, outputs = get_nested_inputs(model), get_nested_outputs(model)
    functional = _Model(inputs, outputs, name=model.name)
    functional.use_legacy_config = getattr(model, "use_legacy_config", None)  # For .h5 files.
    for node in list_nodes(model):
        if add := _ADDED.get(type(node.layer).__name__):
            add(functional, node.layer, node.call_args[0])
    config = functional.get_config()
    _make_loadable(functional, config)
    note_names(functional, config)
    return config


_CONSTANT = "_CONSTANT_VALUE"
"""Keras' placeholder for a first argument that is not a tensor."""


def _make_loadable(model: keras.Model, config: dict[str, Any]) -> None:
    """Replace entries of a functional model's configuration that Keras cannot load, in place.

    `1 + x` becomes `tf.math.add(1, x)`. `x == y` becomes `tf.math.equal(x, y)`, because Keras saves
    `==` and `!=` without `y`. A `tf.einsum` of two tensors becomes a `Contract`, because Keras
    saves no tensors of `tf.einsum`.
    """
    layers = {layer.name: layer for layer in model.layers}
    for entry in config["layers"]:
        layer = layers.get(entry["config"].get("name"))  # A Sequential model hides its input.
        if "layers" in entry["config"] and hasattr(layer, "_network_nodes"):
            _make_loadable(layer, entry["config"])
        function, nodes = entry["config"].get("function"), entry.get("inbound_nodes")
        if entry["class_name"] != "TFOpLambda" or not nodes:
            continue
        is_operator, kind = str(function).startswith("__operators__"), KINDS.get(function)
        if is_operator and kind in ("equal", "not_equal"):
            entry["config"]["function"] = NAMES[kind][-1]
            _save_both_sides(model, layer, entry)
        if nodes[0][0] != _CONSTANT:
            continue
        if is_operator and kind == "add":
            entry["config"]["function"] = NAMES[kind][-1]
        elif kind == "einsum":
            _save_contract(model, layer, entry)


def _save_both_sides(model: keras.Model, layer: keras.layers.Layer, entry: dict[str, Any]) -> None:
    left, right = (
        list(_locate(model, side)) if is_symbolic(side) else np.asarray(side).tolist()
        for side in _find_node(model, layer).call_args
    )
    is_constant = not is_symbolic(_find_node(model, layer).call_args[0])
    first = [_CONSTANT, -1, left] if is_constant else left
    entry["inbound_nodes"] = [[*first, {"y": right, "name": None}]]


def _save_contract(model: keras.Model, layer: keras.layers.Layer, entry: dict[str, Any]) -> None:
    equation, *tensors = _find_node(model, layer).call_args
    if len(tensors) != 2 or not all(map(keras.backend.is_keras_tensor, tensors)):
        return
    serialized = keras.layers.serialize(Contract(equation, name=entry["name"]))
    keys = "module", "class_name", "registered_name", "config"
    entry.update({key: serialized[key] for key in keys})
    entry["inbound_nodes"] = [[[*_locate(model, tensor), {}] for tensor in tensors]]


def _find_node(model: keras.Model, layer: keras.layers.Layer) -> Node:
    nodes = enumerate(layer._inbound_nodes)
    (node,) = (n for index, n in nodes if f"{layer.name}_ib-{index}" in model._network_nodes)
    return node


def _locate(model: keras.Model, tensor: KerasTensor) -> tuple[str, int, int]:
    """Return Keras' reference to a tensor: (layer name, index of the call, index of the output)."""
    layer, call, output = tensor._keras_history
    earlier = (f"{layer.name}_ib-{index}" in model._network_nodes for index in range(call))
    return layer.name, sum(earlier), output
