"""Recognizes functions of one number that a model computes with several operations."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

from keras_qat.frontend.formulas import FUNCTIONS, Formula
from keras_qat.frontend.graph import Call, Graph, Value, values_in
from keras_qat.frontend.tf_operations import ARITHMETIC, is_operation, number
from keras_qat.lowering.builder import LoweringContext

LARGEST = 64
"""A formula has at most so many functions."""

WIDE = {"math.exp", "math.expm1", "math.cosh", "math.sinh", "math.square", "math.pow", "product"}
"""Functions whose results differ much in size: 8 bits keep the large ones alone."""

FLAT = {"quotient", "math.reciprocal", "math.sigmoid", "math.tanh"}
"""Functions with results near to 0, or to 1, of which 8 bits keep one."""

BACK = {"math.log", "math.log1p", "math.sqrt", "math.rsqrt", "math.reciprocal", "math.pow"}
BACK |= {"quotient"}
"""Functions that make small differences large, or that of numbers of unequal size."""


class _Chain(NamedTuple):
    """A function of one tensor."""

    x: Value
    formula: Any
    kinds: frozenset[str]
    """Its operations, with "product" and "quotient" for those of two results."""
    is_poor: bool
    """Whether 8 bits between its operations keep little of it."""
    size: int


def recognize_formulas(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces functions of one tensor such as log(1 + exp(x)) by one layer.

    Its table holds the function; of exp(x) alone 8 bits keep little but the largest.
    """
    chains: dict[Value, _Chain] = {}
    for call in graph.calls:
        if chain := _chain(call, chains):
            chains[call.output] = chain
    readers, read = graph.consumers(), set(values_in(graph.outputs))
    read.update(value for call in graph.loss_only for value in call.inputs)
    calls = []
    for call in reversed(graph.calls):
        values = values_in(call.outputs)
        chain = chains.get(values[0])
        if chain and not any(chain.x is _x(reader, chains) for reader in readers[values[0]]):
            if chain.is_poor:
                call = context.pattern(call, Formula, chain.x, formula=json.dumps(chain.formula))
        elif chain and read.isdisjoint(values):
            continue
        calls.append(call)
        read.update(call.inputs)
    return dataclasses.replace(graph, calls=calls[::-1])


def _x(call: Call, chains: dict[Value, _Chain]) -> Value | None:
    chain = chains.get(values_in(call.outputs)[0])
    return chain and chain.x


def _chain(call: Call, chains: dict[Value, _Chain]) -> _Chain | None:
    """Returns what a call computes as a function of one tensor; None for other calls."""
    symbol = str(call.layer.symbol) if is_operation(call.layer) else ""
    name, terms = ARITHMETIC.get(symbol, symbol), _terms(call)
    if name not in FUNCTIONS or None in terms or not 1 <= len(call.inputs) <= 2:
        return None
    if any(value.dtype != "float32" for value in (*call.inputs, call.output)):
        return None
    own = {value: chains.get(value) for value in call.inputs}
    tensors = {chain.x if chain else value for value, chain in own.items()}
    if len(tensors) == 2 and not (tensors := tensors.intersection(call.inputs)):
        return None
    (x,) = tensors if len(tensors) == 1 else (None,)
    if x is None or x.shape != call.output.shape:
        return None
    inner = {
        v: chain if chain and v is not x else _Chain(v, "x", frozenset(), False, 0)
        for v, chain in own.items()
    }
    if any(chain.x is not x for chain in inner.values()):
        return None
    read = [inner[term] for term in terms if isinstance(term, Value)]
    kind = name
    if name == "divide" and isinstance(terms[1], Value):
        kind, behind = "quotient", inner[terms[1]].kinds
    else:
        kind = "product" if name == "multiply" and len(read) == 2 else name
        behind = frozenset().union(*(chain.kinds for chain in read))
    is_poor = any(chain.is_poor for chain in read)
    is_poor |= kind in BACK and bool(behind & (WIDE | FLAT))
    is_poor |= kind == "math.exp" and bool(behind & WIDE)
    size = 1 + sum(chain.size for chain in read)
    formula = [name, *(inner[t].formula if isinstance(t, Value) else t for t in terms)]
    kinds = frozenset({kind}).union(*(chain.kinds for chain in read))
    return _Chain(x, formula, kinds, is_poor, size) if size <= LARGEST else None


def _terms(call: Call) -> list[Any]:
    """Returns the tensors and numbers that a call computes with; None for what is neither."""
    given = [*call.args, *(value for key, value in call.kwargs.items() if key != "name")]
    return [term if isinstance(term, Value) else number(term) for term in given]
