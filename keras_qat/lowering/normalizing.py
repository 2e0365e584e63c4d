"""Recognizes layers that divide by the size of their inputs, for which 8 bits are few."""

from __future__ import annotations

from collections.abc import Iterable

from keras_qat.graph.calls import Call, Graph, Value, values_in
from keras_qat.graph.tf_operations import is_operation, operands

WHOLE = (
    *("nn.batch_normalization", "compat.v1.nn.fused_batch_norm", "nn.local_response_normalization"),
    *("linalg.normalize",),
)
"""Operations that normalize by themselves."""

ROOTS = ("math.rsqrt", "math.sqrt")

SIZES = (
    *("math.reduce_mean", "math.reduce_sum", "math.reduce_variance", "math.reduce_std"),
    *("nn.moments", "compat.v1.nn.weighted_moments", "norm", "linalg.norm", "compat.v1.norm"),
)
"""Operations that measure a tensor."""


def normalizing(graph: Graph, of_weights: set[Value]) -> str:
    """Returns TensorFlow's name of the operation with which a graph normalizes; "" if none does.

    Args:
        graph: the calls of an opened layer.
        of_weights: values that depend on weights alone, which are computed before they are
            quantized.
    """
    readers = graph.consumers()
    for call in graph.calls:
        symbol = _symbol(call)
        if of_weights.issuperset(values_in(call.outputs)):
            continue
        if symbol in WHOLE:
            return symbol
        measures = symbol in SIZES[3:] or (symbol in ROOTS and _has_size_behind(call))
        if measures and (symbol == "math.rsqrt" or _divides(call, readers)):
            return symbol
    return ""


def _symbol(call: Call) -> str:
    return str(call.layer.symbol) if is_operation(call.layer) else ""


def _has_size_behind(call: Call) -> bool:
    """Returns whether a root is of what measures a tensor."""
    return any(_symbol(earlier) in SIZES for earlier in _before(call, set()))


def _before(call: Call, seen: set[Call]) -> Iterable[Call]:
    for value in call.inputs:
        if value.producer is not None and value.producer not in seen:
            seen.add(value.producer)
            yield value.producer
            yield from _before(value.producer, seen)


def _divides(call: Call, readers: dict[Value, list[Call]]) -> bool:
    """Returns whether what is behind a call divides by what it returns."""
    reached, queue = set(values_in(call.outputs)), [call]
    while queue:
        for value in values_in(queue.pop().outputs):
            for reader in readers[value]:
                if _symbol(reader) in ("math.reciprocal", "math.rsqrt"):
                    return True
                if "div" in _symbol(reader) and operands(reader, "x", "y")[1] in reached:
                    return True
                if not reached.issuperset(values_in(reader.outputs)):
                    reached.update(values_in(reader.outputs))
                    queue.append(reader)
    return False
