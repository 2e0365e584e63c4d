"""Calls that compute the same are one call with several readers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import tensorflow as tf

from keras_qat.frontend.graph import Call, Graph, Value, map_values, takes_training
from keras_qat.frontend.tf_operations import is_operation
from keras_qat.ops.registry import op_of

__all__ = ["merge_common_subexpressions"]


def merge_common_subexpressions(graph: Graph) -> Graph:
    """`graph` without calls that repeat another one on the same tensors.

    TensorFlow computes them once, and a quantizer that only one of them has would be lost.
    """
    first: dict[Any, Call] = {}
    instead: dict[Value, Value] = {}
    calls = []
    replaced = lambda structure: map_values(lambda v: instead.get(v, v), structure)  # noqa: E731
    for call in graph.calls:
        call.args, call.kwargs = replaced((call.args, call.kwargs))
        key = _key(call, bool(call.layer.weights or graph.weights.get(call.layer)))
        twin = first.setdefault(key, call) if key else call
        if twin is call:
            calls.append(call)
        else:
            instead[call.output] = twin.output
    for call in graph.loss_only:
        call.args, call.kwargs = replaced((call.args, call.kwargs))
    return dataclasses.replace(graph, calls=calls, outputs=replaced(graph.outputs))


def _key(call: Call, has_weights: bool) -> Any:
    """What two calls have in common that compute the same, or None if that is not known."""
    layer = call.layer
    if op_of(call) is None or not is_known(layer) or takes_training(layer):
        return None
    if len(tf.nest.flatten(call.outputs)) > 1:
        return None
    config = {name: each for name, each in layer.get_config().items() if name != "name"}
    identity = id(layer) if has_weights else json.dumps(config, sort_keys=True, default=repr)
    arguments = [
        id(leaf) if isinstance(leaf, Value) else repr(leaf)
        for leaf in tf.nest.flatten((call.args, call.kwargs))
    ]
    structure = repr(map_values(lambda _: None, (call.args, call.kwargs)))
    return type(layer), identity, tuple(arguments), structure


def is_known(layer: Any) -> bool:
    """Whether a layer is Keras' own, and not a custom one with a rule."""
    return is_operation(layer) or type(layer).__module__.split(".")[0] in ("keras", "tf_keras")
