"""Recognizes masks that models add to attention scores as large negative numbers."""

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

HIDES = -1e3
"""A number that is added to scores hides them from softmax if it is this low or lower."""


def recognize_masks(graph: Graph) -> Graph:
    """Replaces softmax(scores + mask * -1e9) by a softmax of `MaskScores`.

    The sum would have a scale of 4e6 in 8 bits, which leaves nothing of the scores.
    """
    readers = graph.consumers()
    replaced: dict[Call, Call] = {}
    dropped: set[Call] = set()
    for call in graph.calls:
        op = op_of(call)
        total = call.inputs[0].producer if op is not None and op.name == "softmax" else None
        if total is None or readers[total.output] != [call]:
            continue
        match = _match_mask(total)
        if match is None:
            continue
        scores, mask, product, causal = match
        name, dtype = total.layer.name, policy_of(total.output.dtype)
        layer = MaskScores(causal, hidden=True, name=name, dtype=dtype)
        inputs = [scores] if mask is None else [scores, mask]
        replaced[total] = Call(layer, (inputs,), {}, total.outputs, total.name).as_part_of(total)
        if product is not None and readers[product.output] == [total]:
            dropped.add(product)
    if not replaced:
        return graph
    calls = [replaced.get(call, call) for call in graph.calls if call not in dropped]
    return dataclasses.replace(graph, calls=calls)


def _match_mask(total: Call) -> tuple[Value, Value | None, Call | None, Any] | None:
    """Returns the scores that a sum masks, the mask, the mask's multiplication and causal steps.

    None if the sum is no mask. A causal mask has steps; any other has a mask and a
    multiplication.
    """
    is_layer = type(total.layer) is keras.layers.Add
    kind, terms = "add" if is_layer else _kind(total), _terms(total)
    if kind not in ("add", "subtract"):
        return None
    sign = -1.0 if kind == "subtract" else 1.0
    for scores, term in (terms, terms[::-1]) if len(terms) == 2 else ():
        if not isinstance(scores, Value) or (kind == "subtract" and scores is not terms[0]):
            continue
        if not isinstance(term, Value):
            steps = _causal_steps(sign * term)
            if steps is not None and steps == scores.shape[-2:]:
                return scores, None, None, steps
            continue
        product = term.producer
        factors = _terms(product) if product and _kind(product) == "multiply" else []
        masks = [factor for factor in factors if isinstance(factor, Value)]
        numbers = [factor for factor in factors if not isinstance(factor, Value)]
        is_mask = len(masks) == len(numbers) == 1 and numbers[0].ndim == 0
        if is_mask and sign * numbers[0] <= HIDES and len(masks[0].shape) == len(scores.shape):
            return scores, masks[0], product, None
    return None


def _kind(call: Call) -> str:
    """Names an arithmetic operation; "" for any other call."""
    return ARITHMETIC.get(str(call.layer.symbol), "") if is_operation(call.layer) else ""


def _terms(call: Call) -> list[Any]:
    """Returns the tensors and arrays that a call combines."""
    if not is_operation(call.layer):
        return list(call.inputs)
    arguments = [*call.args, *(arg for name, arg in call.kwargs.items() if name != "name")]
    terms = [arg if isinstance(arg, Value) else array(arg) for arg in arguments]
    return [term for term in terms if term is not None]


def _causal_steps(term: np.ndarray) -> tuple[int, int] | None:
    """Returns the numbers of query and key steps if a constant hides exactly the later steps."""
    term = np.squeeze(term)
    if term.ndim != 2:
        return None
    queries, keys = map(int, term.shape)
    seen = np.tri(queries, keys) > 0
    hides = np.array_equal(term == 0, seen) and np.array_equal(term <= HIDES, seen == 0)
    return (queries, keys) if hides else None
