"""Prints a graph for people: one line for each call."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import name_in_tensorflow

_MOST_ELEMENTS = 8
"""Constants with more elements are described by their shape."""


def list_calls(graph: Graph) -> list[str]:
    """Return one line for each call: its outputs, what it computes, and its arguments."""
    return list(map(describe_call, graph.calls))


def list_changes(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """Yield the lines that two listings do not share, marked by `-` and `+`."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind != "equal":
            yield from (f"- {line}" for line in before[i:j])
            yield from (f"+ {line}" for line in after[k:m])


def describe_call(call: Call) -> str:
    """Return a call as text, such as `relu float32 (None, 8) = nn.relu(dense)`."""
    layer = call.layer
    kind = name_in_tensorflow(layer) or type(layer).__name__
    outputs = ", ".join(
        f"{value.name} {value.dtype} {value.shape}" for value in flatten_values(call.outputs)
    )
    arguments = [_describe(x) for x in call.args]
    options = {name: x for name, x in call.kwargs.items() if x is not None and name != "name"}
    arguments += [f"{name}={_describe(x)}" for name, x in options.items()]
    return f"{outputs} = {kind}({', '.join(arguments)})"


def _describe(argument: Any) -> str:
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
