"""Passes that remove additions of zeros, repeated calls and identities, and rename calls."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, is_batch_norm, map_values
from keras_qat.graph.facts import Facts, StructuralKeys, describe_argument
from keras_qat.graph.operations import get_kind, is_operation
from keras_qat.keras2.backend import layers
from keras_qat.keras2.layers_and_models import accepts_training, is_of_keras
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, rewrite_calls
from keras_qat.lowering.read_operations import HIDES, Uniform, find_uniform
from keras_qat.ops.registry import find_op

Structure = TypeVar("Structure")

IGNORES = {"maximum": HIDES, "minimum": -HIDES}
"""A maximum ignores constants of -1000 or less. A minimum ignores constants of 1000 or more."""


def fold_uniform_constants(graph: Graph, context: LoweringContext) -> Graph:
    """Remove additions of zeros, as in `x + zeros_like(x)`.

    In `maximum(x, y)`, `y` becomes a constant if all its values are equal and very low. The tensor
    `y` would widen the range of `x`, because the operands of a maximum share one range. `minimum`
    is treated in the same way.
    """
    facts, known = Facts(), dict[Value, Uniform]()
    for value in (call.output for call in graph.calls):
        uniform = facts.find(find_uniform, value)
        if uniform is not None and value.is_float and None not in value.shape[1:]:
            known[value] = uniform
    if not any(uniform.is_exact for uniform in known.values()):
        return graph
    return rewrite_calls(graph, lambda call: _fold(call, known, context))


def _fold(call: Call, known: Mapping[Value, Uniform], context: LoweringContext) -> list[Call]:
    others = [value for value in call.inputs if value not in known]
    values = [known[value].value for value in call.inputs if value in known]
    if call.output in known or len(others) != 1 or len(values) != 1:
        return []
    kind, (other,), (value,) = get_kind(call), others, values
    if call.output.shape != other.shape:
        return []
    if value == 0.0 and (kind == "add" or (kind == "subtract" and call.args[0] is other)):
        # A new name, because later steps of a loop add other values under the old name.
        parts = PartsBuilder(call, context)
        return parts.end(parts.new("sum_with_zeros", layers.Activation, "linear"), other)
    if kind not in IGNORES or value / IGNORES[kind] < 1.0:
        return []
    x = np.full([size or 1 for size in call.output.shape], value, np.float32)
    return [call.replace(args=(other, x), kwargs={})]


def merge_common_subexpressions(graph: Graph, context: LoweringContext) -> Graph:
    """Merge calls that compute the same function of the same tensors.

    TensorFlow's optimizer merges such calls anyway. A quantizer after only one of them gets lost.
    """

    def identify(call: Call) -> Hashable | None:
        """Return a key for the function of a call. Return None if the call must not be merged."""
        layer = call.layer
        is_known = is_operation(layer) or is_of_keras(layer)
        if find_op(call) is None or not is_known or accepts_training(layer):
            return None
        has_weights = bool(layer.weights or graph.weights.get(layer))
        return type(layer), id(layer) if has_weights else _describe_configuration(layer)

    keys, first = StructuralKeys(identify), dict[int, Call]()
    merged: dict[Value, Value] = {}
    for call in graph.calls:
        earlier = first.setdefault(keys.find_index(call.output), call)
        if earlier is not call:
            merged[call.output] = earlier.output

    def replace(structure: Structure) -> Structure:
        result: Structure = map_values(lambda value: merged.get(value, value), structure)
        return result

    def read_merged(call: Call) -> Call:
        args, kwargs = replace((call.args, call.kwargs))
        return dataclasses.replace(call, args=args, kwargs=kwargs)

    return dataclasses.replace(
        graph,
        calls=[read_merged(call) for call in graph.calls if call.output not in merged],
        loss_only=list(map(read_merged, graph.loss_only)),
        outputs=replace(graph.outputs),
    )


def _describe_configuration(layer: layers.Layer) -> str:
    config = {key: value for key, value in layer.get_config().items() if key != "name"}
    return json.dumps(config, sort_keys=True, default=lambda leaf: repr(describe_argument(leaf)))


def drop_identities(graph: Graph, context: LoweringContext) -> Graph:
    """Remove linear activations between a layer and a BatchNormalization that can be folded."""
    consumers, outputs = graph.consumers(), flatten_values(graph.outputs)
    calls = {call: call for call in graph.calls}
    for call in graph.calls:
        op = find_op(call)
        if op is None or op.name != "linear" or len(consumers[call.output]) != 1:
            continue
        producer, (reader,) = call.inputs[0].producer, consumers[call.output]
        weighted = find_op(producer) if producer is not None else None
        if producer is None or weighted is None or not weighted.folds_batch_norm:
            continue
        is_read_once = consumers[producer.output] == [call] and producer.output not in outputs
        if is_batch_norm(reader) and is_read_once:
            args, kwargs = producer.args, producer.kwargs
            calls[producer] = Call(producer.layer, args, kwargs, call.outputs, producer.name)
            del calls[call]
    return dataclasses.replace(graph, calls=list(calls.values()))


def make_names_unique(graph: Graph, context: LoweringContext) -> Graph:
    """Rename components, such as `conv_depthwise`, if another layer already has the name."""
    owners = {call.name: call.layer for call in graph.calls if call.name == call.origin}

    def rename(call: Call) -> Call:
        name = call.name
        while owners.setdefault(name, call.layer) is not call.layer:
            name += "_"
        for value in flatten_values(call.outputs):
            if name != call.name and value.name.startswith(call.name):
                value.name = name + value.name.removeprefix(call.name)
        return dataclasses.replace(call, name=name)

    return dataclasses.replace(graph, calls=list(map(rename, graph.calls)))
