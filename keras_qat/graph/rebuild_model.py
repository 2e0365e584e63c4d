"""Makes a Keras model from a graph, call by call, or computes a graph on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.loadable_config import loadable
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import get_nested_inputs, get_nested_outputs, list_nodes
from keras_qat.keras2.names_in_configs import note_names

_Model = keras.Model


def get_functional_config(model: Any) -> dict[str, Any]:
    """Returns a model's configuration as a functional one, for `keras.Model.from_config`."""
    inputs, outputs = get_nested_inputs(model), get_nested_outputs(model)
    functional = _Model(inputs, outputs, name=model.name)
    functional.use_legacy_config = getattr(model, "use_legacy_config", None)  # Set for .h5 files.
    for node in list_nodes(model):
        if add := _ADDED.get(type(node.layer).__name__):
            add(functional, node.layer, node.call_args[0])
    config = loadable(functional, functional.get_config())
    note_names(functional, config)
    return config


_ADDED: dict[str, Callable[[Any, Any, Any], None]] = {
    "AddLoss": lambda model, layer, tensor: model.add_loss(tensor),
    "AddMetric": lambda model, layer, tensor: model.add_metric(
        tensor, layer.metric_name, aggregation=layer.aggregation
    ),
}
"""Class of a layer that `add_loss` or `add_metric` makes -> a function that adds it to a copy."""


def _call_layer(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    return call.layer(*args, **kwargs)


Apply = Callable[[Call, Any, dict[str, Any]], Any]
"""Computes the outputs of a call from its arguments."""


def rebuild_model(graph: Graph, model_class: Any = _Model, apply: Apply = _call_layer) -> Any:
    """Makes a model from a graph, with the layers of its calls or with what `apply` calls."""
    inputs = map_values(
        lambda value: make_input(value.shape, value.dtype, value.name), graph.inputs
    )
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


def make_input(shape: Any, dtype: Any, name: str | None = None) -> Any:
    """Returns a symbolic input whose shape includes the batch."""
    return keras.Input(type_spec=tf.TensorSpec(shape, dtype), name=name)


def evaluate_graph(graph: Graph, inputs: list[Any], apply: Apply = _call_layer) -> Any:
    """Computes a graph on a flat list of inputs and returns the structure of its outputs.

    `apply` computes the outputs of a call from its arguments; by default it calls the layer.
    """
    tensors = dict(zip(flatten_values(graph.inputs), inputs, strict=True))
    last_readers = {value: call for call in graph.calls for value in call.inputs}
    outputs = set(flatten_values(graph.outputs))
    for call in graph.calls:
        _compute([call], tensors, apply)
        for value in set(call.inputs) - outputs:
            if last_readers[value] is call:  # Frees memory where nothing is traced.
                del tensors[value]
    return map_values(tensors.__getitem__, graph.outputs)


def _compute(calls: list[Call], tensors: dict[Value, Any], apply: Apply) -> None:
    """Computes calls in order and adds their outputs to `tensors`."""
    for call in calls:
        args, kwargs = map_values(tensors.__getitem__, (call.args, call.kwargs))
        outputs = tf.nest.flatten(call.outputs), tf.nest.flatten(apply(call, args, kwargs))
        tensors.update(zip(*outputs, strict=True))
