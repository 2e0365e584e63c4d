"""A graph made from another one, call by call: with other layers, and layers in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from keras_qat.frontend.graph import Call, Graph, Value, map_values, split_loss_only, values_in

__all__ = ["InsertedCall", "Replacement", "copy_graph"]


class InsertedCall(NamedTuple):
    """A call that comes between what makes a value and what reads it.

    Args:
        layer: the layer.
        name: the name of the call.
        kwargs: the layer's keyword arguments.
    """

    layer: Any
    name: str
    kwargs: dict[str, Any]


class Replacement(NamedTuple):
    """A call that takes the place of another.

    Args:
        layer: the layer.
        reads: the call whose arguments it takes.
    """

    layer: Any
    reads: Call


def copy_graph(
    graph: Graph,
    instead: Mapping[Call, Replacement],
    behind: Mapping[Value, list[InsertedCall]],
    ends: Mapping[Value, InsertedCall],
) -> Graph:
    """The graph with other calls in place of its own, and calls in between.

    Args:
        graph: the graph, which stays as it is.
        instead: what takes the place of its calls, in order. Calls that are not there drop out.
        behind: what comes behind the inputs and what those calls write, for all that reads it.
        ends: what comes behind outputs, for nobody but who reads the outputs.
    """
    calls: list[Call] = []
    current: dict[Value, Value] = {}  # Value of the graph -> the value that takes its place.

    def copy(value: Value) -> Value:
        current[value] = Value(value.name, value.shape, value.dtype)
        return current[value]

    def in_float32(value: Value) -> Value:
        """An input; in float32, as the file's, for any real numbers."""
        copy(value).dtype = value.inference_dtype
        return current[value]

    def put_behind(value: Value, between: InsertedCall) -> None:
        layer, name, kwargs = between
        before = current[value]
        calls.append(Call(layer, (before,), kwargs, copy(value), name))

    def finish(values: Any) -> None:
        for value in values_in(values):
            for each in behind[value]:
                put_behind(value, each)

    inputs = map_values(in_float32, graph.inputs)
    finish(graph.inputs)
    for call, (layer, reads) in instead.items():
        args, kwargs = map_values(current.__getitem__, (reads.args, reads.kwargs))
        calls.append(Call(layer, args, kwargs, map_values(copy, call.outputs), layer.name))
        finish(call.outputs)
    for value, between in ends.items():
        put_behind(value, between)
    outputs = map_values(current.__getitem__, graph.outputs)
    needed, loss_only = split_loss_only(calls, outputs)
    return Graph(graph.name, inputs, outputs, graph.output_names, needed, loss_only=loss_only)
