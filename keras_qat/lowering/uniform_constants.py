"""Folds arithmetic on uniform constants, as `zeros_like` and `fill` make them for each example."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_qat.graph.calls import Call, Graph, Value, values_in
from keras_qat.graph.facts import Facts
from keras_qat.graph.operations import kind_of
from keras_qat.graph.size_expressions import BATCH, computed_sizes
from keras_qat.graph.tf_operations import number, operands
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.masked_scores import HIDES

SIZES = {"zeros": "shape", "ones": "shape", "fill": "dims"}
"""Operation that makes a uniform constant -> name of the argument that has its sizes."""

CONSTANTS = {"zeros": 0.0, "zeros_like": 0.0, "ones": 1.0, "ones_like": 1.0}
"""Operation that makes a uniform constant -> its value."""

IGNORES = {"maximum": HIDES, "minimum": -HIDES}
"""Operation that keeps a tensor's range -> the value from which on it ignores its other input."""

COMPUTES = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


class Uniform(NamedTuple):
    """A tensor whose elements all have one value, or lie near it, far from all other tensors."""

    value: float
    is_exact: bool = True


def evaluate_fill(call: Call) -> np.ndarray | None:
    """Return one example of a uniform constant that a call makes; None if not all is known."""
    kind = kind_of(call)
    shape: list[Any] | None = None
    value: Any = None
    if kind in SIZES:
        sizes, value = operands(call, SIZES[kind], "value")
        shape = computed_sizes(sizes) if values_in(sizes) else None
    elif kind in CONSTANTS and None not in call.output.shape[1:]:
        shape = [BATCH if size is None else size for size in call.output.shape]
    value = number(CONSTANTS.get(kind, value)) if shape else None
    if not shape or value is None or shape[0] != BATCH or {BATCH, -1}.intersection(shape[1:]):
        return None
    return np.full([1, *shape[1:]], value, np.float32) if call.output.is_float else None


def find_uniform(value: Value) -> Generator[Value, Any, Uniform | None]:
    """Find the one value of all elements of a tensor."""
    call = value.producer
    if call is None or (kind := kind_of(call)) not in (*SIZES, *CONSTANTS, *COMPUTES, "exp"):
        return None
    if kind in SIZES or kind in CONSTANTS:
        example = evaluate_fill(call)
        return None if example is None else Uniform(float(example.flat[0]))
    if not all(x.is_float for x in [*call.inputs, value]):
        return None
    terms = []
    for x in call.inputs if kind == "exp" else operands(call, "x", "y"):
        constant = None if isinstance(x, Value) else number(x)
        found = (yield x) if isinstance(x, Value) else None
        terms.append(found if constant is None else Uniform(constant))
    if kind == "exp":
        return Uniform(0.0) if terms[0] is not None and terms[0].value <= HIDES else None
    if None in call.output.shape[1:]:
        return None
    exact = [term.value for term in terms if term is not None and term.is_exact]
    if len(exact) == 2:
        return Uniform(float(COMPUTES[kind](*exact)))
    if kind == "multiply":
        return Uniform(0.0) if 0.0 in exact else None
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
    found = {call.output: facts.find(find_uniform, call.output) for call in graph.calls}
    known = {value: uniform for value, uniform in found.items() if uniform is not None}
    if not any(uniform.is_exact for uniform in known.values()):
        return graph
    calls = [new for call in graph.calls for new in _fold(call, known, context)]
    return dataclasses.replace(graph, calls=calls)


def _fold(call: Call, known: Mapping[Value, Uniform], context: LoweringContext) -> list[Call]:
    """Returns a call without zeros that it adds, and with a constant that it compares with."""
    kind = kind_of(call)
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
    return [call.in_place(args=(other, x), kwargs={})]
