"""Finds inputs of a model that keep their exact values, such as labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.facts import reach


def may_be_labels(value: Value, graph: Graph, op_of: Callable[[Call], Any]) -> bool:
    """Tell whether only layers in float read an input of a graph, while others are in integers.

    An opaque layer that compares predictions with labels would compare them with rounded labels.

    Args:
        value: the input.
        graph: its graph.
        op_of: returns the operator of a call in integers, and None for a call in float.
    """
    consumers = graph.consumers(losses=False)

    def reaches_integers(value: Value) -> bool:
        """Tell whether a call in integers reads a tensor, or one that is computed from it."""

        def compute_in_float(x: Value) -> list[Value]:
            return [y for c in consumers[x] if op_of(c) is None for y in flatten_values(c.outputs)]

        return any(op_of(c) for x in reach([value], compute_in_float) for c in consumers[x])

    others = map(reaches_integers, flatten_values(graph.inputs))
    return bool(consumers[value]) and not reaches_integers(value) and any(others)
