"""Masks that models add to the scores of attention as large negative numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_qat.frontend.graph import Call, Graph, Value
from keras_qat.frontend.helper_layers import MaskScores
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.keras2.precision import policy_of
from keras_qat.frontend.tf_operations import ARITHMETIC, array, is_operation
from keras_qat.ops.registry import op_of

__all__ = ["recognize_masks"]

HIDES = -1e3
"""From here on a number that is added to a score leaves softmax nothing of it."""


def recognize_masks(graph: Graph) -> Graph:
    """`graph` with softmax(scores + mask * -1e9) as a softmax of masked scores.

    In 8 bits the sum would have steps of 4e6, and nothing would be left of the scores.
    """
    readers = graph.consumers()
    replaced: dict[Call, Call] = {}
    dropped: set[Call] = set()
    for call in graph.calls:
        op = op_of(call)
        total = call.inputs[0].producer if op is not None and op.name == "softmax" else None
        if total is None or readers[total.output] != [call]:
            continue
        found = _masked(total)
        if found is None:
            continue
        scores, mask, product, causal = found
        name, dtype = total.layer.name, policy_of(total.output.dtype)
        layer = MaskScores(causal, hidden=True, name=name, dtype=dtype)
        given = [scores] if mask is None else [scores, mask]
        replaced[total] = Call(layer, (given,), {}, total.outputs, total.name).as_part_of(total)
        if product is not None and readers[product.output] == [total]:
            dropped.add(product)
    if not replaced:
        return graph
    calls = [replaced.get(call, call) for call in graph.calls if call not in dropped]
    return dataclasses.replace(graph, calls=calls)


def _masked(total: Call) -> tuple[Value, Value | None, Call | None, Any] | None:
    """The scores and the mask that a sum adds, what multiplies that, or its steps if causal."""
    is_layer = type(total.layer) is keras.layers.Add
    kind, terms = "add" if is_layer else _kind(total), _terms(total)
    if kind not in ("add", "subtract"):
        return None
    sign = -1.0 if kind == "subtract" else 1.0
    for scores, term in (terms, terms[::-1]) if len(terms) == 2 else ():
        if not isinstance(scores, Value) or (kind == "subtract" and scores is not terms[0]):
            continue
        if not isinstance(term, Value):
            steps = _causal(sign * term)
            if steps is not None and steps == scores.shape[-2:]:
                return scores, None, None, steps
            continue
        product = term.producer
        factors = _terms(product) if product and _kind(product) == "multiply" else []
        masks = [each for each in factors if isinstance(each, Value)]
        numbers = [each for each in factors if not isinstance(each, Value)]
        is_mask = len(masks) == len(numbers) == 1 and numbers[0].ndim == 0
        if is_mask and sign * numbers[0] <= HIDES and len(masks[0].shape) == len(scores.shape):
            return scores, masks[0], product, None
    return None


def _kind(call: Call) -> str:
    """What an operation computes; "" for what is no arithmetic."""
    return ARITHMETIC.get(str(call.layer.symbol), "") if is_operation(call.layer) else ""


def _terms(call: Call) -> list[Any]:
    """What a call combines: tensors and arrays."""
    if not is_operation(call.layer):
        return list(call.inputs)
    given = [*call.args, *(each for name, each in call.kwargs.items() if name != "name")]
    found = [each if isinstance(each, Value) else array(each) for each in given]
    return [each for each in found if each is not None]


def _causal(term: np.ndarray) -> tuple[int, int] | None:
    """The numbers of steps, if a constant hides later steps and nothing else."""
    term = np.squeeze(term)
    if term.ndim != 2:
        return None
    queries, keys = map(int, term.shape)
    seen = np.tri(queries, keys) > 0
    hides = np.array_equal(term == 0, seen) and np.array_equal(term <= HIDES, seen == 0)
    return (queries, keys) if hides else None
