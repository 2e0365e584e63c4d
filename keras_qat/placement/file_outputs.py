"""Implements `quantize_model(model, outputs=...)`, and finds outputs that concatenate tensors.

Exported files then return tensors inside the model, for example before a concatenation.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Generator, Iterable
from typing import Any

from keras_qat.config.recipe import Recipe
from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.facts import solve
from keras_qat.ops.op import SharedRange
from keras_qat.ops.registry import match


@dataclasses.dataclass(frozen=True)
class JoinedOutput:
    """A model output that concatenates tensors with the names `parts`. They share one range."""

    output: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"output {self.output}: {', '.join(self.parts)} are concatenated and share one range, "
            f"which is coarse for tensors with small values. For separate ranges, export them "
            f"separately: quantize_model(model, outputs={list(self.parts)})"
        )


def find_joined_outputs(outputs: Iterable[Value]) -> tuple[JoinedOutput, ...]:
    """Returns the outputs that concatenate tensors, such as boxes and scores."""
    found = {value.name: parts for value in outputs if (parts := solve(value, find_concatenated))}
    return tuple(JoinedOutput(name, tuple(parts)) for name, parts in found.items())


def find_concatenated(value: Value) -> Generator[Value, Any, list[str]]:
    """Returns the names of `a` and `b` if `value` is `concat(a, b)` or `reshape(concat(a, b))`."""
    call = value.producer
    if call is None:
        return []
    op, attributes, _ = match(call)
    if op is None or not isinstance(op.output, SharedRange):
        return []
    parts = list(dict.fromkeys(part for part in call.inputs if part.is_float))
    axis, rank = attributes.get("axis"), len(value.shape)
    if len(parts) > 1 and axis is not None and axis % rank == rank - 1:
        return [_undo_lowering(part, call).name for part in parts]
    names: dict[str, None] = {}
    for part in parts:
        names.update(dict.fromkeys((yield part)))
    return list(names)


def _undo_lowering(value: Value, call: Call) -> Value:
    """Return the tensor that the layer of `call` read in place of `value` before lowering."""
    producer = value.producer
    return producer.inputs[0] if producer and producer.source is call.source else value


def check_names(names: Iterable[str]) -> list[str]:
    """Returns the user's names of outputs as a list. Raises a `ValueError` for repeated names."""
    listed = [names] if isinstance(names, str) else list(names)
    if not listed or not all(isinstance(name, str) for name in listed):
        raise ValueError(
            f"outputs={names!r}: pass the names of the layers that compute the outputs of exported "
            f"files, such as ['boxes', 'scores']. keras_qat.plan(model) lists them."
        )
    if twice := [name for name in listed if listed.count(name) > 1]:
        raise ValueError(f"outputs contains {twice[0]!r} twice. Pass each name once.")
    return listed


def add_outputs(graph: Graph, names: list[str], recipe: Recipe) -> Graph:
    """Replaces the outputs of a graph by a pair (original outputs, tensors with the `names`)."""
    if recipe.placement != "int8":
        raise ValueError(
            f"Recipe {recipe.name!r} does not support outputs=. Use another recipe, such as 'int8'."
        )
    values = {value.name: value for value in graph.values()}
    ends = [values[name] for name in names if name in values]
    return dataclasses.replace(graph, outputs=(graph.outputs, ends))


def replace_outputs(lowered: Graph, read: Graph, names: list[str]) -> Graph:
    """After lowering, replaces the outputs from `add_outputs` by all tensors with the `names`.

    `read` is the graph before lowering. Tensors inside custom layers exist only in `lowered`.
    """
    outputs, of_layers = lowered.outputs
    known = [value.name for value in read.values()]
    ends = iter(of_layers)
    values = {value.name: value for value in [*lowered.values(), *of_layers]}
    values |= {name: next(ends) for name in names if name in known}
    for name in names:
        if name not in values or not values[name].is_float:
            near = difflib.get_close_matches(name, [*known, *values], n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"outputs contains {name!r}, which is not a float tensor of "
                f"'{lowered.name}'.{meant} The last tensors are: {', '.join(known[-8:])}"
            )
    chosen = [values[name] for name in names]
    if loose := [value.name for value in chosen if value in flatten_values(lowered.inputs)]:
        raise ValueError(
            f"outputs contains {loose[0]!r}, an input of the model. Pass names of layers after it."
        )
    return dataclasses.replace(lowered, outputs=(outputs, chosen))
