"""Folds arithmetic on uniform constants, as `zeros_like` and `fill` make them for each example."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_qat.graph.calls import Call, Graph, Value
from keras_qat.graph.facts import Facts
from keras_qat.graph.operations import get_kind, get_operands, read_scalar
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.masked_scores import HIDES
from keras_qat.lowering.read_operations import find_uniform

IGNORES = {"maximum": HIDES, "minimum": -HIDES}
"""Operation that keeps a tensor's range -> the value from which on it ignores its other input."""

COMPUTES = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


class Uniform(NamedTuple):
    """A tensor whose elements all have one value, or lie near it, far from all other tensors."""

    value: float
    is_exact: bool = True


def find_nearly_uniform(value: Value, facts: Facts) -> Generator[Value, Any, Uniform | None]:
    """Find the value that all elements of a tensor have, or lie near.

    Args:
        value: the tensor.
        facts: keeps answers about uniform constants.
    """
    call, exact = value.producer, find_uniform(value, facts)
    if exact is not None and value.is_float and None not in value.shape[1:]:
        return Uniform(exact)
    kind = "" if call is None else get_kind(call)
    if call is None or not all(x.is_float for x in [value, *call.inputs]):
        return None
    if kind == "exp":
        exponent = yield call.inputs[0]
        return Uniform(0.0) if exponent is not None and exponent.value <= HIDES else None
    if kind not in COMPUTES or None in value.shape[1:]:
        return None
    terms = []
    for x in get_operands(call, "x", "y"):
        constant = None if isinstance(x, Value) else read_scalar(x)
        found = (yield x) if isinstance(x, Value) else None
        terms.append(found if constant is None else Uniform(constant))
    values = [term.value for term in terms if term is not None and term.is_exact]
    if len(values) == 2:
        return Uniform(float(COMPUTES[kind](*values)))
    if kind == "multiply":
        return Uniform(0.0) if 0.0 in values else None
    known = [term.value for term in terms if term is not None]
    if len(known) != 1 or abs(known[0]) < -HIDES:
        return None
    is_negated = kind == "subtract" and terms[0] is None
    return Uniform(-known[0] if is_negated else known[0], is_exact=False)


def fold_uniform_constants(graph: Graph, context: LoweringContext) -> Graph:
    """Drops calls that compute uniform constants, sums with zeros and products with zeros.

    Maxima read a constant in place of a tensor far below all others, because the tensor would widen
    the range that they share. So do minima, far above.
    """
    facts = Facts()
    rule = functools.partial(find_nearly_uniform, facts=facts)
    found = {call.output: facts.find(rule, call.output) for call in graph.calls}
    known = {value: uniform for value, uniform in found.items() if uniform is not None}
    if not any(uniform.is_exact for uniform in known.values()):
        return graph
    calls = [new for call in graph.calls for new in _fold(call, known, context)]
    return dataclasses.replace(graph, calls=calls)


def _fold(call: Call, known: Mapping[Value, Uniform], context: LoweringContext) -> list[Call]:
    """Returns a call without zeros that it adds, and with a constant that it compares with."""
    kind = get_kind(call)
    others = [value for value in call.inputs if value not in known]
    values = [known[value].value for value in call.inputs if value in known]
    if (
        call.output in known
        or len(others) != 1
        or len(values) != 1
        or call.output.shape != others[0].shape
    ):
        return [call]
    (other,), (value,) = others, values
    if call.output.shape != other.shape:
        return [call]
    if value == 0.0 and (kind == "add" or (kind == "subtract" and call.args[0] is other)):
        # Under a name of its own: later steps, which add something, have this one.
        parts = PartsBuilder(call, context)
        return parts.end(parts.new("sum_with_zeros", layers.Activation, "linear"), other)
    if kind not in IGNORES or value / IGNORES[kind] < 1.0:
        return [call]
    x = np.full([size or 1 for size in call.output.shape], value, np.float32)
    return [call.replace(args=(other, x), kwargs={})]
