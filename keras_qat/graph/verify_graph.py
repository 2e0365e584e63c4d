"""Checks that a graph is consistent."""

from __future__ import annotations

from collections.abc import Iterator

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.facts import Facts
from keras_qat.graph.static_shapes import infer_shapes
from keras_qat.keras2.backend import layers


class InconsistentGraph(AssertionError):
    """Raised for a graph that breaks a rule."""


def verify_graph(graph: Graph, step: str, is_complete: bool = True) -> None:
    """Raise if a graph is inconsistent.

    Args:
        graph: the graph.
        step: what made it, for the message.
        is_complete: whether names must be unique, and shapes are compared with inferred ones.

    Raises:
        InconsistentGraph: with everything that is wrong.
    """
    if problems := list(find_problems(graph, is_complete)):
        raise InconsistentGraph(f"after {step!r}:\n" + "\n".join(problems))


def find_problems(graph: Graph, is_complete: bool = True) -> Iterator[str]:
    """Yield what is wrong with a graph, one line for each problem."""
    known: set[Value] = set(flatten_values(graph.inputs))
    for value in known:
        if value.producer is not None:
            yield f"input {value.name} has a producer, {value.producer.name}"
    named: dict[str, Call] = {}
    facts = Facts()
    for call in [*graph.calls, *graph.loss_only]:
        for value in call.inputs:
            if value not in known:
                yield f"{call.name} reads {value.name}, which no earlier call computes"
        for value in flatten_values(call.outputs):
            if value in known:
                yield f"{call.name} computes {value.name}, which has been computed before"
            if value.producer is not call:
                yield f"{value.name} says that {value.producer} computes it, not {call.name}"
            known.add(value)
        if not is_complete:
            continue
        if named.setdefault(call.name, call).layer is not call.layer:
            yield f"two layers are called {call.name}"
        yield from _find_wrong_shapes(call, facts)
    for value in flatten_values(graph.outputs):
        if value not in known:
            yield f"no call computes the output {value.name}"


def _find_wrong_shapes(call: Call, facts: Facts) -> Iterator[str]:
    values, layer = flatten_values(call.outputs), call.layer
    if isinstance(layer, layers.EinsumDense) and not layer.built:
        return  # Its kernel's shape is not known yet.
    for value, shape in zip(values, infer_shapes(call, facts), strict=False):
        sizes = [(a, b) for a, b in zip(value.shape, shape, strict=False) if None not in (a, b)]
        if len(value.shape) != len(shape) or any(a != b for a, b in sizes):
            yield f"{call.name} computes {shape}, but {value.name} has the shape {value.shape}"
