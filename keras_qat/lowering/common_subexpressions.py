"""Merges calls that compute the same into one call with several readers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Mapping
from typing import Any

from keras_qat.graph.calls import Call, Graph, Value, map_values
from keras_qat.graph.facts import StructuralKeys, describe_argument
from keras_qat.graph.operations import is_operation
from keras_qat.keras2.layer_names import is_of_keras
from keras_qat.keras2.layers_and_models import accepts_training
from keras_qat.lowering.builder import LoweringContext
from keras_qat.ops.registry import find_op


def merge_common_subexpressions(graph: Graph, context: LoweringContext) -> Graph:
    """Drops calls that repeat another call on the same tensors.

    TensorFlow computes such calls once, and a quantizer on only one of them would be lost.
    """

    def identify(call: Call) -> Hashable | None:
        """Return a key that calls share if equal inputs give equal outputs."""
        layer = call.layer
        if find_op(call) is None or not is_known(layer) or accepts_training(layer):
            return None
        has_weights = bool(layer.weights or graph.weights.get(layer))
        return type(layer), id(layer) if has_weights else _describe_configuration(layer)

    keys, first = StructuralKeys(identify), dict[int, Call]()
    merged: dict[Value, Value] = {}
    for call in graph.calls:
        earlier = first.setdefault(keys.find_index(call.output), call)
        if earlier is not call:
            merged[call.output] = earlier.output

    def with_merged(call: Call) -> Call:
        args, kwargs = _replace(merged, (call.args, call.kwargs))
        return dataclasses.replace(call, args=args, kwargs=kwargs)

    return dataclasses.replace(
        graph,
        calls=[with_merged(call) for call in graph.calls if call.output not in merged],
        loss_only=list(map(with_merged, graph.loss_only)),
        outputs=_replace(merged, graph.outputs),
    )


def _replace(merged: Mapping[Value, Value], structure: Any) -> Any:
    return map_values(lambda value: merged.get(value, value), structure)


def _describe_configuration(layer: Any) -> str:
    config = {key: value for key, value in layer.get_config().items() if key != "name"}
    return json.dumps(config, sort_keys=True, default=lambda leaf: repr(describe_argument(leaf)))


def is_known(layer: Any) -> bool:
    """Tell whether a layer is one of Keras' own or an operation."""
    return is_operation(layer) or is_of_keras(layer)
