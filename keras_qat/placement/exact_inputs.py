"""Finds inputs of a model that keep their exact values, such as labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_qat.graph.calls import Call, Graph, Value, values_in


def may_be_labels(value: Value, graph: Graph, op_of: Callable[[Call], Any]) -> bool:
    """Tell whether only layers in float read an input of a graph, while others are in integers.

    An opaque layer that compares predictions with labels would compare them with rounded labels.

    Args:
        value: the input.
        graph: its graph.
        op_of: returns the operator of a call in integers, and None for a call in float.
    """
    is_read = any(value in call.inputs for call in graph.calls)
    return (
        is_read
        and not _reaches_integers(value, graph, op_of)
        and any(_reaches_integers(other, graph, op_of) for other in values_in(graph.inputs))
    )


def _reaches_integers(value: Value, graph: Graph, op_of: Callable[[Call], Any]) -> bool:
    """Tell whether a call in integers reads a tensor, or one that is computed from it."""
    computed = {value}
    for call in graph.calls:
        if not computed.isdisjoint(call.inputs):
            if op_of(call) is not None:
                return True
            computed.update(values_in(call.outputs))
    return False
