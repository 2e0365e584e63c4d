"""Replaces chains of elementwise operations, such as log(1 + exp(x)), by one lookup table."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import is_operation, read_scalar
from keras_qat.helper_layers.elementwise_functions import FUNCTIONS, Formula
from keras_qat.keras2.backend import keras, layers
from keras_qat.lowering.activations import compute_log_sum, split_activation
from keras_qat.lowering.builder import LoweringContext, rewrite_calls
from keras_qat.lowering.expand_call import make_symbol, trace_in_place
from keras_qat.lowering.read_operations import ACTIVATIONS, read_operation
from keras_qat.ops.registry import match

LARGEST = 64
"""The maximum number of operations in a chain."""

_SOFTMAX = "softmax"

_RANGES = np.array([[4.0], [8.0]])
"""Chains are tested on inputs from -4 to 4, and from -8 to 8."""

_LOSS = 3.2
"""A chain becomes a table if its noise from rounding is more than this many times that of a table.
Without large errors, chains of two or three operations have at most twice the noise of a table."""

_INAUDIBLE = 1e-5
"""Noise is ignored if its power, divided by the variance of the results, is below this (-50 dB)."""

_SPLIT = (layers.Dense, layers.EinsumDense, layers.Conv1D, layers.Conv2D)
"""The activations of these layers are split off if they can begin a chain."""


class _Chain(NamedTuple):
    """A chain of elementwise operations that together compute a function of one tensor."""

    x: Value
    formula: str | list[Any]
    exact: NDArray[Any]
    """Float results for test inputs: one row for each range in `_RANGES`."""
    rounded: NDArray[Any]
    """The same results if each operation of the chain rounds to 8 bits."""
    divides: bool
    """Whether a tensor is divided by a tensor."""
    size: int


def recognize_chains(graph: Graph, context: LoweringContext) -> Graph:
    """Replace functions of one tensor, such as log(1 + exp(x)), by one layer with a lookup table.

    A chain becomes a table if rounding after each operation is much less accurate than rounding
    once. For example, 8 bits round small values of exp(x) to 0, so log(exp(x)) is wrong. A chain
    that divides by a tensor always becomes a table, because division needs several operators.
    """
    chains: dict[Value, _Chain] = {}
    graph = _split_activations(graph, context)
    for call in graph.calls:
        if chain := _find_chain(call, chains):
            chains[call.output] = chain
    read = set(flatten_values(graph.outputs))
    read.update(value for call in graph.loss_only for value in call.inputs)
    inside, calls, judged = set(chains), [], set(read)
    for call in reversed(graph.calls):
        values = flatten_values(call.outputs)
        if values and inside.issuperset(values) and read.isdisjoint(values):
            continue
        parts, chain = [call], chains.get(next(iter(values), None))  # type: ignore[arg-type]
        if chain and call.output in judged and call.output.is_float and _needs_table(chain):
            table = [part.as_part_of(call) for part in _make_table(call, chain, context)]
            parts = table or [call]
            if table and chain.x not in table[-1].inputs:
                inside.add(chain.x)  # The new calls read the scores instead of the softmax.
        calls += parts[::-1]
        for value in (value for part in parts for value in part.inputs):
            read.add(value)
            if chain is None or value not in chains or chains[value].x is not chain.x:
                judged.add(value)  # The last operation decides for all operations of the chain.
    return dataclasses.replace(graph, calls=calls[::-1])


def _split_activations(graph: Graph, context: LoweringContext) -> Graph:
    """Split off a layer's activation if a chain can begin with it, as in log(softmax(x))."""
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
    """Return the calls of a lookup table. If it follows softmax(x), it reads log(softmax(x))."""
    scores, axis = _find_scores(chain.x)

    def compute() -> tf.Tensor:
        formula = json.dumps(chain.formula)
        if scores is None:
            return Formula(formula)(make_symbol(chain.x))
        _, below, logarithm = compute_log_sum(make_symbol(scores), axis)
        if chain.formula == ["log", "x"]:
            return tf.subtract(below, logarithm)
        x = tf.subtract(below, logarithm, name="log_softmax")
        return Formula(formula.replace('"x"', '["exp", "x"]'))(x)

    return trace_in_place(call, compute, context)


def _find_scores(value: Value) -> tuple[Value | None, int]:
    """Return the input and the axis of the softmax that computes a value. Else return (None, 0)."""
    call = value.producer
    if call is None or len(call.inputs) != 1 or call.inputs[0].masked:
        return None, 0
    op, attributes, _ = match(call)
    if op is None or op.name != _SOFTMAX:
        return None, 0
    return call.inputs[0], attributes["axis"] % len(value.shape)


def _find_chain(call: Call, chains: dict[Value, _Chain]) -> _Chain | None:
    """Return the chain that ends in a call. Return None if the chain reads several tensors."""
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
    inner = {v: chain if chain and v is not x else _start_chain(v) for v, chain in own.items()}
    if any(chain.x is not x for chain in inner.values()):
        return None
    read = [inner[term] for term in terms if isinstance(term, Value)]
    size = 1 + sum(chain.size for chain in read)
    if size > LARGEST:
        return None
    formula = [name, *(inner[t].formula if isinstance(t, Value) else t for t in terms)]
    exact = _compute(name, [inner[t].exact if isinstance(t, Value) else t for t in terms])
    rounded = _round(
        _compute(name, [inner[t].rounded if isinstance(t, Value) else t for t in terms])
    )
    divides = name == "divide" and isinstance(terms[1], Value)
    divides |= any(chain.divides for chain in read)
    return _Chain(x, formula, exact, rounded, divides, size)


def _start_chain(x: Value) -> _Chain:
    """Return a chain without operations. If `x` is a softmax, most test inputs are near 0."""
    is_softmax = _find_scores(x)[0] is not None
    exact = np.exp(_RANGES * np.linspace(-1, 0, 256)) if is_softmax else _RANGES * _GRID
    return _Chain(x, "x", exact, _round(exact), False, 0)


_GRID = np.arange(-128, 128) / 128


def _compute(name: str, terms: list[Any]) -> NDArray[Any]:
    """Compute an operation. Infinite results become the lowest or highest finite result."""
    with tf.init_scope():
        results = np.asarray(FUNCTIONS[name](*map(np.asarray, terms)))
    if results.dtype == bool:
        return results
    is_finite = np.isfinite(results)
    low = np.min(results, -1, keepdims=True, initial=0.0, where=is_finite)
    high = np.max(results, -1, keepdims=True, initial=0.0, where=is_finite)
    return np.where(is_finite, results, np.where(results > 0, high, low))


def _round(results: NDArray[Any]) -> NDArray[Any]:
    """Round each row to 8 bits in its own range, which includes 0. Return float values."""
    if results.dtype == bool:
        return results
    low, high = np.minimum(results.min(-1), 0.0), np.maximum(results.max(-1), 0.0)
    scale = np.maximum(high - low, 1e-30)[:, None] / 255
    zero = np.round(-low[:, None] / scale)
    return (np.clip(np.round(results / scale) + zero, 0, 255) - zero) * scale


def _needs_table(chain: _Chain) -> bool:
    """Return True if the chain divides, or if a table is much more accurate."""
    if chain.divides or chain.exact.dtype == bool:
        return chain.divides
    exact = chain.exact
    noise, least = (np.mean((y - exact) ** 2, -1) for y in (chain.rounded, _round(exact)))
    return bool(np.any(noise > _LOSS * np.maximum(least, _INAUDIBLE * np.var(exact, -1))))


def _read(call: Call) -> tuple[str, list[Any]]:
    """Return the name of a call's function in `FUNCTIONS`, or "", and the arguments.

    Arguments other than tensors and numbers become None.
    """
    kind, arguments = read_operation(call)
    is_known = is_operation(call.layer) or type(call.layer) is layers.Activation
    terms = [term if isinstance(term, Value) else read_scalar(term) for term in arguments]
    return kind if is_known and kind in FUNCTIONS else "", terms
