"""Prints a graph, one line for each call, and checks that it is consistent."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.facts import Facts
from keras_qat.graph.operations import name_in_tensorflow
from keras_qat.graph.sizes import infer_shapes
from keras_qat.keras2.backend import layers

_MOST_ELEMENTS = 8
"""For constants with more elements, only the shape is printed."""


def list_calls(graph: Graph) -> list[str]:
    """Returns one line for each call: its outputs, its kind, and its arguments."""
    return list(map(describe_call, graph.calls))


def list_changes(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """Yields the lines that differ between two results of `list_calls`, marked with `-` and `+`."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind != "equal":
            yield from (f"- {line}" for line in before[i:j])
            yield from (f"+ {line}" for line in after[k:m])


def describe_call(call: Call) -> str:
    """Returns a call as text, such as `relu float32 (None, 8) = nn.relu(dense)`."""
    kind = name_in_tensorflow(call.layer) or type(call.layer).__name__
    outputs = ", ".join(f"{x.name} {x.dtype} {x.shape}" for x in flatten_values(call.outputs))
    options = {name: x for name, x in call.kwargs.items() if x is not None and name != "name"}
    arguments = [_describe(x) for x in call.args]
    arguments += [f"{name}={_describe(x)}" for name, x in options.items()]
    return f"{outputs} = {kind}({', '.join(arguments)})"


def _describe(argument: object) -> str:
    if isinstance(argument, Value):
        return argument.name
    if isinstance(argument, dict):
        return f"{{{', '.join(f'{key}: {_describe(x)}' for key, x in argument.items())}}}"
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_describe, argument))}]"
    if tf.is_tensor(argument) or isinstance(argument, np.ndarray):
        array = np.asarray(argument)
        return str(array.tolist()) if array.size <= _MOST_ELEMENTS else f"<{array.shape}>"
    return str(argument)


class InconsistentGraph(AssertionError):
    """Raised if a graph is inconsistent. This is a fault of the library."""


def verify_graph(graph: Graph, step: str, is_complete: bool = True) -> None:
    """Raises if a graph is inconsistent.

    Args:
        graph: the graph.
        step: the pass that created the graph, for the message.
        is_complete: True to also check that names are unique and shapes are possible.

    Raises:
        InconsistentGraph: with a list of all problems.
    """
    if problems := list(find_problems(graph, is_complete)):
        raise InconsistentGraph(f"after {step!r}:\n" + "\n".join(problems))


def find_problems(graph: Graph, is_complete: bool = True) -> Iterator[str]:
    known: set[Value] = set(flatten_values(graph.inputs))
    for value in known:
        if value.producer is not None:
            yield f"input {value.name} has a producer, {value.producer.name}"
    calls: dict[str, Call] = {}
    facts = Facts()
    for call in [*graph.calls, *graph.loss_only]:
        for value in call.inputs:
            if value not in known:
                yield f"{call.name} reads {value.name}, which no earlier call computes"
        for value in flatten_values(call.outputs):
            if value in known:
                yield f"{call.name} computes {value.name}, which has been computed before"
            if value.producer is not call:
                yield f"the producer of {value.name} is {value.producer}, not {call.name}"
            known.add(value)
        if not is_complete:
            continue
        if calls.setdefault(call.name, call).layer is not call.layer:
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
