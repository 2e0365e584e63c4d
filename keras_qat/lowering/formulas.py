"""Recognizes functions of one number that a model computes with several operations."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, values_in
from keras_qat.graph.operations import is_operation, kind_of
from keras_qat.graph.tf_operations import arguments_in_order, number, operation_class
from keras_qat.helper_layers.elementwise_functions import FUNCTIONS, Formula
from keras_qat.keras2.backend import keras, layers
from keras_qat.lowering.activations import split_activation
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.softmax import log_sum
from keras_qat.ops.registry import match

LARGEST = 64
"""A formula has at most so many functions."""

WIDE = {"exp", "expm1", "cosh", "sinh", "square", "pow", "product"}
"""Functions whose results differ much in size: 8 bits keep the large ones alone."""

SHARES = "softmax"

FLAT = {SHARES, "quotient", "root", "reciprocal", "sigmoid", "tanh"}
"""Functions with results near to 0, or to 1, of which 8 bits keep one."""

BACK = {"log", "log1p", "sqrt", "rsqrt", "reciprocal", "root", "quotient"}
"""Functions that make small differences large, or that of numbers of unequal size."""

CHOICES = {"exp", "where", "maximum", "minimum", "clip_by_value"}
"""Functions whose results may be of the smaller numbers alone, as in an ELU by hand."""

ACTIVATIONS = {
    keras.activations.sigmoid: "sigmoid",
    keras.activations.tanh: "tanh",
    keras.activations.exponential: "exp",
    keras.activations.softplus: "softplus",
}
"""Keras' activation -> the function of a formula that it is."""

SPLIT_OFF = [*ACTIVATIONS, keras.activations.softmax]
"""Activations that are split off where a formula reads them."""

SPLIT = (layers.Dense, layers.EinsumDense, layers.Conv1D, layers.Conv2D)
"""Layers that they are split off."""


class _Chain(NamedTuple):
    """A function of one tensor."""

    x: Value
    formula: Any
    kinds: frozenset[str]
    """Its operations: "product" and "quotient" of two results, "root" for powers below 1."""
    is_poor: bool
    """Whether 8 bits between its operations keep little of it."""
    size: int


def recognize_formulas(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces functions of one tensor such as log(1 + exp(x)) by one layer.

    Its table holds the function; of exp(x) alone 8 bits keep little but the largest.
    """
    chains: dict[Value, _Chain] = {}
    graph = _with_activations_apart(graph, context)
    for call in graph.calls:
        if chain := _chain(call, chains):
            chains[call.output] = chain
    read = set(values_in(graph.outputs))
    read.update(value for call in graph.loss_only for value in call.inputs)
    inside, calls = set(chains), []
    for call in reversed(graph.calls):
        values = values_in(call.outputs)
        if values and inside.issuperset(values) and read.isdisjoint(values):
            continue
        parts, chain = [call], chains.get(next(iter(values), None))  # type: ignore[arg-type]
        if chain and chain.is_poor and call.output.is_float:
            parts = _in_one(call, chain, context)
            if chain.x not in parts[-1].inputs:
                inside.add(chain.x)  # A softmax, of whose scores the parts are.
        calls += parts[::-1]
        read.update(value for part in parts for value in part.inputs)
    return dataclasses.replace(graph, calls=calls[::-1])


def _with_activations_apart(graph: Graph, context: LoweringContext) -> Graph:
    """Splits off activations of layers of which functions are computed, as log(softmax)."""
    readers, calls = graph.consumers(), list[Call]()
    for call in graph.calls:
        is_split = type(call.layer) in SPLIT and call.layer.activation in SPLIT_OFF
        is_read = is_split and any(map(_name, readers[call.output]))
        parts = split_activation(call, context) if is_read else []
        calls += [part.as_part_of(call) for part in parts] or [call]
    return dataclasses.replace(graph, calls=calls)


def _in_one(call: Call, chain: _Chain, context: LoweringContext) -> list[Call]:
    """Returns the layer that computes a chain: of logarithms, where that is of a softmax."""
    scores, axis = _softmax_of(chain.x)
    if scores is None:
        return [context.pattern(call, Formula, chain.x, formula=json.dumps(chain.formula))]
    parts, subtract = PartsBuilder(call, context), tf.math.subtract
    _, below, logarithm = log_sum(parts, scores, axis)
    if chain.formula == ["log", "x"]:
        return parts.end(parts.new("", operation_class(), subtract), below, logarithm)
    less = parts.new("log_softmax", operation_class(), subtract)
    x = parts.add(less, below, logarithm, shape=scores.shape)
    formula = json.dumps(chain.formula).replace('"x"', '["exp", "x"]')
    return parts.end(parts.new("", Formula, formula), x)


def _softmax_of(value: Value) -> tuple[Value | None, int]:
    """Returns the scores and the axis of the softmax that a tensor is; None for others."""
    call = value.producer
    if call is None or len(call.inputs) != 1 or call.inputs[0].masked:
        return None, 0
    op, attributes, _ = match(call)
    is_softmax = op is not None and op.name == SHARES
    if not is_softmax:
        return None, 0
    return call.inputs[0], attributes["axis"] % len(value.shape)


def _chain(call: Call, chains: dict[Value, _Chain]) -> _Chain | None:
    """Returns what a call computes as a function of one tensor; None for other calls."""
    name, terms = _name(call), _terms(call)
    if not name or None in terms or not call.inputs:
        return None
    if call.output.dtype not in ("float32", "bool"):
        return None
    if any(value.dtype != "float32" and value not in chains for value in call.inputs):
        return None
    own = {value: chains.get(value) for value in call.inputs}
    tensors = {chain.x if chain else value for value, chain in own.items()}
    if len(tensors) == 2 and not (tensors := tensors.intersection(call.inputs)):
        return None
    (x,) = tensors if len(tensors) == 1 else (None,)
    if x is None or x.shape != call.output.shape:
        return None
    inner = {
        v: chain if chain and v is not x else _Chain(v, "x", _kinds_of(v), False, 0)
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
        if name == "pow" and isinstance(terms[1], float) and terms[1] < 1:
            kind = "root"
        behind = frozenset().union(*(chain.kinds for chain in read))
    is_poor = any(chain.is_poor for chain in read)
    is_poor |= kind == "quotient" or (kind in BACK and bool(behind & (WIDE | FLAT)))
    is_poor |= kind in CHOICES and bool(behind & WIDE)
    size = 1 + sum(chain.size for chain in read)
    formula = [name, *(inner[t].formula if isinstance(t, Value) else t for t in terms)]
    kinds = frozenset({kind}).union(*(chain.kinds for chain in read))
    return _Chain(x, formula, kinds, is_poor, size) if size <= LARGEST else None


def _name(call: Call) -> str:
    """Returns the name of the function that a call computes; "" of one that is not known."""
    if type(call.layer) is layers.Activation:
        functions = (name for f, name in ACTIVATIONS.items() if f is call.layer.activation)
        return next(functions, "")
    return kind_of(call) if kind_of(call) in FUNCTIONS else ""


def _kinds_of(x: Value) -> frozenset[str]:
    return frozenset() if _softmax_of(x)[0] is None else frozenset({SHARES})


def _terms(call: Call) -> list[Any]:
    """Returns the tensors and numbers that a call computes with; None for what is neither."""
    given = arguments_in_order(call) if is_operation(call.layer) else call.inputs
    return [term if isinstance(term, Value) else number(term) for term in given]
