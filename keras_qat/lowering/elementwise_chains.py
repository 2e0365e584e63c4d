"""Recognizes functions of one tensor that a chain of elementwise operations computes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import is_operation, read_scalar
from keras_qat.helper_layers.elementwise_functions import FUNCTIONS, Formula
from keras_qat.keras2.backend import keras, layers
from keras_qat.lowering.activations import split_activation
from keras_qat.lowering.builder import LoweringContext, rewrite_calls
from keras_qat.lowering.expand_call import make_symbol, trace_in_place
from keras_qat.lowering.expansions.statistics import center_and_log_sum
from keras_qat.lowering.read_operations import ACTIVATIONS, read_operation
from keras_qat.ops.registry import match

LARGEST = 64
"""The largest number of functions in a formula."""

_WIDE = {"exp", "expm1", "cosh", "sinh", "square", "pow", "product"}
"""Functions with results of very different size. 8 bits keep only the large results."""

_SOFTMAX = "softmax"

_FLAT = {_SOFTMAX, "quotient", "root", "reciprocal", "sigmoid", "tanh"}
"""Functions with results near 0 and near 1. 8 bits keep only one of them."""

_STEEP = {"log", "log1p", "sqrt", "rsqrt", "reciprocal", "root", "quotient"}
"""Functions that enlarge differences between small values."""

_SELECTING = {"exp", "where", "maximum", "minimum", "clip_by_value"}
"""Functions that may read only the smaller values, as in an ELU written by hand."""

_SPLIT = (layers.Dense, layers.EinsumDense, layers.Conv1D, layers.Conv2D)
"""Layers whose activations are split off if a chain reads them."""


class _Chain(NamedTuple):
    """A function of one tensor."""

    x: Value
    formula: str | list[Any]
    kinds: frozenset[str]
    """Its operations: "product" and "quotient" of two results, "root" for powers below 1."""
    needs_table: bool
    """Whether 8 bits between its operations would lose accuracy."""
    size: int


def recognize_chains(graph: Graph, context: LoweringContext) -> Graph:
    """Replace functions of one tensor, such as log(1 + exp(x)), by one layer with a lookup table.

    8 bits of exp(x) alone keep little but the largest values.
    """
    chains: dict[Value, _Chain] = {}
    graph = _split_activations(graph, context)
    for call in graph.calls:
        if chain := _find_chain(call, chains):
            chains[call.output] = chain
    read = set(flatten_values(graph.outputs))
    read.update(value for call in graph.loss_only for value in call.inputs)
    inside, calls = set(chains), []
    for call in reversed(graph.calls):
        values = flatten_values(call.outputs)
        if values and inside.issuperset(values) and read.isdisjoint(values):
            continue
        parts, chain = [call], chains.get(next(iter(values), None))  # type: ignore[arg-type]
        if chain and chain.needs_table and call.output.is_float:
            parts = [part.as_part_of(call) for part in _make_table(call, chain, context)]
            if chain.x not in parts[-1].inputs:
                inside.add(chain.x)  # The new calls read the scores of this softmax.
        calls += parts[::-1]
        read.update(value for part in parts for value in part.inputs)
    return dataclasses.replace(graph, calls=calls[::-1])


def _split_activations(graph: Graph, context: LoweringContext) -> Graph:
    """Split activations off layers that a chain reads, as in log(softmax)."""
    readers = graph.consumers()
    split = [function for function, kind in ACTIVATIONS.items() if kind in FUNCTIONS]
    split.append(keras.activations.softmax)

    def rewrite(call: Call) -> list[Call]:
        is_split = type(call.layer) in _SPLIT and call.layer.activation in split
        is_read = is_split and any(_read(reader)[0] for reader in readers[call.output])
        parts = split_activation(call, context) if is_read else []
        return [part.as_part_of(call) for part in parts]

    return rewrite_calls(graph, rewrite)


def _make_table(call: Call, chain: _Chain, context: LoweringContext) -> list[Call]:
    """Return the layer that computes a chain; of logarithms, if the chain reads a softmax."""
    scores, axis = _find_scores(chain.x)

    def compute() -> tf.Tensor:
        formula = json.dumps(chain.formula)
        if scores is None:
            return Formula(formula)(make_symbol(chain.x))
        _, below, logarithm = center_and_log_sum(make_symbol(scores), axis)
        if chain.formula == ["log", "x"]:
            return tf.subtract(below, logarithm)
        x = tf.subtract(below, logarithm, name="log_softmax")
        return Formula(formula.replace('"x"', '["exp", "x"]'))(x)

    return trace_in_place(call, compute, context)


def _find_scores(value: Value) -> tuple[Value | None, int]:
    """Return the scores and the axis of a softmax; None for other tensors."""
    call = value.producer
    if call is None or len(call.inputs) != 1 or call.inputs[0].masked:
        return None, 0
    op, attributes, _ = match(call)
    if op is None or op.name != _SOFTMAX:
        return None, 0
    return call.inputs[0], attributes["axis"] % len(value.shape)


def _find_chain(call: Call, chains: dict[Value, _Chain]) -> _Chain | None:
    """Return what a call computes as a function of one tensor; None for other calls."""
    name, terms = _read(call)
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
        v: chain if chain and v is not x else _Chain(v, "x", _find_kinds(v), False, 0)
        for v, chain in own.items()
    }
    if any(chain.x is not x for chain in inner.values()):
        return None
    read = [inner[term] for term in terms if isinstance(term, Value)]
    kind = name
    if name == "divide" and isinstance(terms[1], Value):
        kind, inputs = "quotient", inner[terms[1]].kinds
    else:
        kind = "product" if name == "multiply" and len(read) == 2 else name
        if name == "pow" and isinstance(terms[1], float) and terms[1] < 1:
            kind = "root"
        inputs = frozenset().union(*(chain.kinds for chain in read))
    needs_table = any(chain.needs_table for chain in read)
    needs_table |= kind == "quotient" or (kind in _STEEP and bool(inputs & (_WIDE | _FLAT)))
    needs_table |= kind in _SELECTING and bool(inputs & _WIDE)
    size = 1 + sum(chain.size for chain in read)
    formula = [name, *(inner[t].formula if isinstance(t, Value) else t for t in terms)]
    kinds = frozenset({kind}).union(*(chain.kinds for chain in read))
    return _Chain(x, formula, kinds, needs_table, size) if size <= LARGEST else None


def _find_kinds(x: Value) -> frozenset[str]:
    return frozenset() if _find_scores(x)[0] is None else frozenset({_SOFTMAX})


def _read(call: Call) -> tuple[str, list[Any]]:
    """Return the function that a call computes, and its tensors and numbers; "" for other calls.

    An argument that is neither a tensor nor a number becomes None.
    """
    kind, arguments = read_operation(call)
    is_known = is_operation(call.layer) or type(call.layer) is layers.Activation
    terms = [term if isinstance(term, Value) else read_scalar(term) for term in arguments]
    return kind if is_known and kind in FUNCTIONS else "", terms
