"""Outputs of files that lie inside the model, and outputs that should be cut before a join."""

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
    """An output whose parts, side by side along the last axis, have one range for all of them.

    Args:
        output: name of the output.
        parts: names of the tensors that are joined.
    """

    output: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"output {self.output}: {', '.join(self.parts)} are concatenated and share one range, "
            f"which is coarse for tensors with small values. To give each its own range, export "
            f"them separately: quantize_model(model, outputs={list(self.parts)})"
        )


def joined_outputs(outputs: Iterable[Value]) -> tuple[JoinedOutput, ...]:
    """Finds outputs that are joined of unlike parts, such as boxes and scores, in one range."""
    joins = {value.name: joined for value in outputs if (joined := solve(value, find_joined))}
    return tuple(JoinedOutput(name, tuple(parts)) for name, parts in joins.items())


def find_joined(value: Value) -> Generator[Value, Any, list[str]]:
    """Find the tensors that are concatenated along the last axis, if only moves follow."""
    call = value.producer
    if call is None:
        return []
    op, attributes, _ = match(call)
    if op is None or not isinstance(op.output, SharedRange):
        return []
    parts = list(dict.fromkeys(part for part in call.inputs if part.is_float))
    axis, rank = attributes.get("axis"), len(value.shape)
    if len(parts) > 1 and axis is not None and axis % rank == rank - 1:
        return [_before_lowering(part, call).name for part in parts]
    names: dict[str, None] = {}
    for part in parts:
        names.update(dict.fromkeys((yield part)))
    return list(names)


def _before_lowering(value: Value, call: Call) -> Value:
    """Returns the tensor that a call reads in the user's model."""
    producer = value.producer
    return producer.inputs[0] if producer and producer.source is call.source else value


def checked_names(names: Iterable[str]) -> list[str]:
    """Returns the names of outputs as a list.

    Raises:
        ValueError: if they are no names, none, or one of them is there twice.
    """
    listed = [names] if isinstance(names, str) else list(names)
    if not listed or not all(isinstance(name, str) for name in listed):
        raise ValueError(
            f"outputs={names!r}: pass the names of the layers that compute the outputs of exported "
            f"files, such as ['boxes', 'scores']. keras_qat.plan(model) lists them."
        )
    if twice := [name for name in listed if listed.count(name) > 1]:
        raise ValueError(f"outputs contains {twice[0]!r} twice. Pass each name once.")
    return listed


def ending_at(graph: Graph, names: list[str], recipe: Recipe) -> Graph:
    """Returns a graph whose outputs are its own and, as a list, the named tensors that it has.

    Raises:
        ValueError: if the recipe is one of the original's, which has no outputs of its own.
    """
    if recipe.placement != "int8":
        raise ValueError(
            f"Recipe {recipe.name!r} does not support outputs=. Use another recipe, such as 'int8'."
        )
    values = {value.name: value for value in graph.values()}
    ends = [values[name] for name in names if name in values]
    return dataclasses.replace(graph, outputs=(graph.outputs, ends))


def ending_inside(lowered: Graph, read: Graph, names: list[str]) -> Graph:
    """Returns the lowered graph of `ending_at` with an end for every name.

    Those that the model's own layers do not have are parts of layers, as `plan` lists them.

    Raises:
        ValueError: if there is no such tensor, it holds no real numbers, or it is an input.
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
