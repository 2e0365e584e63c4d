"""A graph made from another one, call by call: with other layers, and layers in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from keras_qat.keras2.graph import Call, Graph, Value, map_values, split_aside, values_in

__all__ = ["Between", "GraphCopy"]


class Between(NamedTuple):
    """A call that comes between what makes a value and what reads it.

    Args:
        layer: the layer.
        name: the name of the call.
        kwargs: the layer's keyword arguments.
    """

    layer: Any
    name: str
    kwargs: dict[str, Any]


class GraphCopy:
    """What has been made of a graph so far: its inputs, in the beginning.

    Args:
        graph: the graph, which stays as it is.
        behind: what comes behind a value, in order.
    """

    def __init__(self, graph: Graph, behind: Callable[[Value], list[Between]]) -> None:
        self._graph, self._behind = graph, behind
        self._calls: list[Call] = []
        self._current: dict[Value, Value] = {}
        """Value of the graph -> the value that takes its place."""
        self._inputs = map_values(self._input, graph.inputs)
        self._finish(graph.inputs)

    def add(self, layer: Any, reads: Call, writes: Call) -> None:
        """Calls `layer` on what `reads` reads, in place of what `writes` computes."""
        args, kwargs = map_values(self._current.__getitem__, (reads.args, reads.kwargs))
        outputs = map_values(self._copy, writes.outputs)
        self._calls.append(Call(layer, args, kwargs, outputs, layer.name))
        self._finish(writes.outputs)

    def put_behind(self, value: Value, between: Between) -> None:
        """Puts a call behind a value: what comes later reads its output instead."""
        layer, name, kwargs = between
        before = self._current[value]
        self._calls.append(Call(layer, (before,), kwargs, self._copy(value), name))

    def graph(self) -> Graph:
        """The new graph."""
        old = self._graph
        outputs = map_values(self._current.__getitem__, old.outputs)
        calls, aside = split_aside(self._calls, outputs)
        return Graph(old.name, self._inputs, outputs, old.output_names, calls, aside=aside)

    def _copy(self, value: Value) -> Value:
        self._current[value] = Value(value.name, value.shape, value.dtype)
        return self._current[value]

    def _input(self, value: Value) -> Value:
        """An input; in float32, as the file's, for any real numbers."""
        self._copy(value).dtype = value.inference_dtype
        return self._current[value]

    def _finish(self, values: Any) -> None:
        for value in values_in(values):
            for each in self._behind(value):
                self.put_behind(value, each)
