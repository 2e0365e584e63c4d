"""A graph as one call, in which layers that hand tensors to each other are opened together."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, map_values
from keras_qat.keras2.backend import keras


def as_one_call(graph: Graph) -> Graph:
    """Returns a graph of one call, of a model that calls the layers one after the other."""
    call = Call(WholeGraph(graph), (graph.inputs,), {}, graph.outputs, graph.name)
    return dataclasses.replace(graph, calls=[call])


class WholeGraph(keras.Model):
    """Calls the layers of a graph.

    Attributes:
        names: id of a layer -> the name of its first call.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(name=graph.name)
        self._self_graph = graph
        self._self_parts = list(dict.fromkeys(call.layer for call in graph.calls))
        self.names = {id(call.layer): call.name for call in reversed(graph.calls)}

    def call(self, inputs: Any) -> Any:
        known: dict[Value, Any] = {}

        def keep(values: Any, tensors: Any) -> None:
            pairs = zip(tf.nest.flatten(values), tf.nest.flatten(tensors), strict=True)
            known.update((value, tensor) for value, tensor in pairs if isinstance(value, Value))

        keep(self._self_graph.inputs, inputs)
        for call in self._self_graph.calls:
            args, kwargs = map_values(known.__getitem__, (call.args, dict(call.kwargs)))
            keep(call.outputs, call.layer(*args, **kwargs))
        return map_values(known.__getitem__, self._self_graph.outputs)
