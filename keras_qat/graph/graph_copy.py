"""Copies a graph call by call, with replaced layers and with layers inserted between calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values, split_loss_only
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import keras


class InsertedCall(NamedTuple):
    """A call inserted between a value's producer and its readers.

    Args:
        layer: the layer.
        name: the name of the call.
        kwargs: the layer's keyword arguments.
    """

    layer: Any
    name: str
    kwargs: dict[str, Any]


class Replacement(NamedTuple):
    """A layer that replaces the layer of a call.

    Args:
        layer: the layer.
        reads: the call whose arguments the layer takes.
    """

    layer: Any
    reads: Call


def copy_graph(
    graph: Graph,
    replacements: Mapping[Call, Replacement],
    inserted: Mapping[Value, list[InsertedCall]],
    output_calls: Mapping[Value, InsertedCall],
) -> Graph:
    """Copies a graph with replaced calls and with inserted calls.

    Args:
        graph: the graph, which stays as it is.
        replacements: call -> its replacement, in order. Calls without one are dropped.
        inserted: value -> calls inserted after it, for all of its readers.
        output_calls: output value -> a call inserted after it, for the output alone.
    """
    calls: list[Call] = []
    current: dict[Value, Value] = {}  # Value of the graph -> its copy, after inserted calls.

    def copy(value: Value, dtype: str | None = None) -> Value:
        current[value] = Value(value.name, value.shape, dtype or value.dtype)
        return current[value]

    def in_float32(value: Value) -> Value:
        """Copies an input. Floating-point inputs become float32, as in exported files."""
        return copy(value, value.inference_dtype)

    def put_behind(value: Value, insertion: InsertedCall) -> None:
        layer, name, kwargs = insertion
        source = current[value]
        calls.append(Call(layer, (source,), kwargs, copy(value), name))

    def finish(values: Any) -> None:
        for value in flatten_values(values):
            for insertion in inserted[value]:
                put_behind(value, insertion)

    inputs = map_values(in_float32, graph.inputs)
    finish(graph.inputs)
    for call, (layer, reads) in replacements.items():
        args, kwargs = map_values(current.__getitem__, (reads.args, reads.kwargs))
        calls.append(Call(layer, args, kwargs, map_values(copy, call.outputs), layer.name))
        finish(call.outputs)
    for value, insertion in output_calls.items():
        put_behind(value, insertion)
    outputs = map_values(current.__getitem__, graph.outputs)
    needed, loss_only = split_loss_only(calls, outputs)
    return Graph(graph.name, inputs, outputs, graph.output_names, needed, loss_only=loss_only)


def find_used_inputs(nested: Any, outputs: Any) -> Any:
    """Returns the symbolic inputs that outputs depend on, in a list or dict as `nested` is."""
    graph = read_model(keras.Model(nested, outputs))
    used = {value for call in graph.calls for value in call.inputs} | {
        *flatten_values(graph.outputs)
    }
    flat = list(zip(tf.nest.flatten(nested), flatten_values(graph.inputs), strict=True))
    kept = {id(x) for x, value in flat if value in used}
    if isinstance(nested, dict) and len(nested) == len(flat):
        return {key: x for key, x in nested.items() if id(x) in kept}
    if isinstance(nested, (list, tuple)) and len(nested) == len(flat):
        return [x for x in nested if id(x) in kept]
    return nested
