"""Configurations of functional models, with operations in a form that Keras can load."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import KINDS, NAMES
from keras_qat.helper_layers.operations import Contract
from keras_qat.keras2.backend import keras


def loadable(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Replaces what Keras writes so that it cannot be read, in place.

    A constant on the left of `+` becomes an argument of `tf.math.add`. `==` and `!=`, which Keras
    writes without their right side, become `tf.math.equal` and `tf.math.not_equal`. A `tf.einsum`
    of two tensors, which Keras writes without them, becomes a `Contract`.

    Args:
        model: a functional model.
        config: its configuration.

    Returns:
        The configuration.
    """
    layers = {layer.name: layer for layer in model.layers}
    for entry in config["layers"]:
        layer = layers.get(entry["config"].get("name"))  # A Sequential model hides its input.
        if "layers" in entry["config"] and hasattr(layer, "_network_nodes"):
            loadable(layer, entry["config"])
        function, nodes = entry["config"].get("function"), entry.get("inbound_nodes")
        if entry["class_name"] != "TFOpLambda" or not nodes:
            continue
        is_operator, kind = str(function).startswith("__operators__"), KINDS.get(function)
        if is_operator and kind in ("equal", "not_equal"):
            entry["config"]["function"] = NAMES[kind][-1]
            _compare(model, layer, entry)
        if nodes[0][0] != _CONSTANT:
            continue
        if is_operator and kind == "add":
            entry["config"]["function"] = NAMES[kind][-1]
        elif kind == "einsum":
            _contract(model, layer, entry)
    return config


def as_one_array(argument: Any) -> Any:
    """Makes one array of the list of single tensors that Keras loads an array as."""
    is_list = isinstance(argument, (list, tuple)) and len(argument) > 0
    leaves = tf.nest.flatten(argument) if is_list else [None]
    if not all(isinstance(leaf, tf.__internal__.EagerTensor) and not leaf.ndim for leaf in leaves):
        return argument
    return np.asarray(tf.nest.map_structure(lambda leaf: leaf.numpy(), argument))


_CONSTANT = "_CONSTANT_VALUE"
"""Keras' word for a first argument that is no tensor."""


def _compare(model: Any, layer: Any, entry: dict[str, Any]) -> None:
    """Writes both sides of `==` or `!=` into its entry."""
    (node,) = _nodes_of(model, layer)
    is_tensor = [hasattr(side, "_keras_history") for side in node.call_args]
    left, right = (
        list(_position(model, side)) if known else np.asarray(side).tolist()
        for side, known in zip(node.call_args, is_tensor, strict=True)
    )
    first = left if is_tensor[0] else [_CONSTANT, -1, left]
    entry["inbound_nodes"] = [[*first, {"y": right, "name": None}]]


def _contract(model: Any, layer: Any, entry: dict[str, Any]) -> None:
    """Turns the entry of a tf.einsum of two tensors into that of a Contract."""
    (node,) = _nodes_of(model, layer)
    equation, *tensors = node.call_args
    if len(tensors) != 2 or not all(map(keras.backend.is_keras_tensor, tensors)):
        return
    serialized = keras.layers.serialize(Contract(equation, name=entry["name"]))
    entry.update(
        {key: serialized[key] for key in ("module", "class_name", "registered_name", "config")}
    )
    entry["inbound_nodes"] = [[[*_position(model, tensor), {}] for tensor in tensors]]


def _nodes_of(model: Any, layer: Any) -> list[Any]:
    """Returns the calls of a layer that are part of a model."""
    return [node for node in layer._inbound_nodes if _key(layer, node) in model._network_nodes]


def _key(layer: Any, node: Any) -> str:
    return f"{layer.name}_ib-{layer._inbound_nodes.index(node)}"


def _position(model: Any, tensor: Any) -> tuple[str, int, int]:
    """Returns the name of the layer that made a tensor, the number of its call, and of the output.

    Calls count as far as they are in the model.
    """
    layer, call, output = tensor._keras_history
    earlier = (f"{layer.name}_ib-{index}" in model._network_nodes for index in range(call))
    return layer.name, sum(earlier), output
