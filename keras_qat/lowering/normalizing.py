"""Recognizes layers that divide by the size of their inputs, for which 8 bits are few."""

from __future__ import annotations

from collections.abc import Iterable

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import get_kind, get_operands, name_in_tensorflow

WHOLE = (*("batch_normalization", "fused_batch_norm", "local_response_normalization", "normalize"),)
"""Operations that normalize by themselves."""

ROOTS = ("rsqrt", "sqrt")

SIZES = (
    *("reduce_mean", "reduce_sum", "reduce_variance", "reduce_std"),
    *("moments", "weighted_moments", "norm"),
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
        kind = get_kind(call)
        if of_weights.issuperset(flatten_values(call.outputs)):
            continue
        if kind in WHOLE:
            return name_in_tensorflow(call.layer)
        measures = kind in SIZES[3:] or (kind in ROOTS and _has_size_behind(call))
        if measures and (kind == "rsqrt" or _divides(call, readers)):
            return name_in_tensorflow(call.layer)
    return ""


def _has_size_behind(call: Call) -> bool:
    """Returns whether a root is of what measures a tensor."""
    return any(get_kind(earlier) in SIZES for earlier in _before(call, set()))


def _before(call: Call, seen: set[Call]) -> Iterable[Call]:
    for value in call.inputs:
        if value.producer is not None and value.producer not in seen:
            seen.add(value.producer)
            yield value.producer
            yield from _before(value.producer, seen)


def _divides(call: Call, readers: dict[Value, list[Call]]) -> bool:
    """Returns whether what is behind a call divides by what it returns."""
    reached, queue = set(flatten_values(call.outputs)), [call]
    while queue:
        for value in flatten_values(queue.pop().outputs):
            for reader in readers[value]:
                if get_kind(reader) in ("reciprocal", "rsqrt"):
                    return True
                if "div" in get_kind(reader) and get_operands(reader, "x", "y")[1] in reached:
                    return True
                if not reached.issuperset(flatten_values(reader.outputs)):
                    reached.update(flatten_values(reader.outputs))
                    queue.append(reader)
    return False
