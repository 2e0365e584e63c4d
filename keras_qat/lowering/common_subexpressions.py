"""Merges calls that compute the same into one call with several readers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, map_values
from keras_qat.graph.operations import is_operation
from keras_qat.graph.structural_keys import describe, describe_arguments
from keras_qat.keras2.layer_names import is_of_keras
from keras_qat.keras2.layers_and_models import takes_training
from keras_qat.lowering.builder import LoweringContext
from keras_qat.ops.registry import op_of


def merge_common_subexpressions(graph: Graph, context: LoweringContext) -> Graph:
    """Drops calls that repeat another call on the same tensors.

    TensorFlow computes such calls once, and a quantizer on only one of them would be lost.
    """
    first: dict[Any, Call] = {}
    merged: dict[Value, Value] = {}
    calls = []
    replaced = lambda structure: map_values(lambda v: merged.get(v, v), structure)  # noqa: E731
    for call in graph.calls:
        call.args, call.kwargs = replaced((call.args, call.kwargs))
        key = _key(call, bool(call.layer.weights or graph.weights.get(call.layer)))
        earlier = first.setdefault(key, call) if key else call
        if earlier is call:
            calls.append(call)
        else:
            merged[call.output] = earlier.output
    for call in graph.loss_only:
        call.args, call.kwargs = replaced((call.args, call.kwargs))
    return dataclasses.replace(graph, calls=calls, outputs=replaced(graph.outputs))


def _key(call: Call, has_weights: bool) -> Any:
    """Returns a key that equal computations share; None if equality cannot be told."""
    layer = call.layer
    if op_of(call) is None or not is_known(layer) or takes_training(layer):
        return None
    if len(tf.nest.flatten(call.outputs)) > 1:
        return None
    identity = id(layer) if has_weights else _configuration(layer)
    return type(layer), identity, describe_arguments(call, id)


def _configuration(layer: Any) -> str:
    config = {key: value for key, value in layer.get_config().items() if key != "name"}
    return json.dumps(config, sort_keys=True, default=lambda leaf: repr(describe(leaf)))


def is_known(layer: Any) -> bool:
    """Returns whether a layer is Keras' own or an operation."""
    return is_operation(layer) or is_of_keras(layer)
