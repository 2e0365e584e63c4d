"""Finds calls that replace NaN in the inputs of a model. NaN marks missing values.

An example is `tf.where(tf.math.is_nan(x), 0.0, x)`. These calls read the input before it is
quantized, because quantized values cannot be NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.facts import reach
from keras_qat.graph.operations import READS_SHAPES, get_kind, moves_elements
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.backend import layers

REPLACES_NAN = "replaces NaN in an input before rounding, because quantized values cannot be NaN"


def _equals_itself(x: tf.Tensor) -> tf.Tensor:
    return tf.equal(x, x)


def _is_infinite(x: tf.Tensor, name: str | None = None) -> tf.Tensor:
    return tf.logical_and(_equals_itself(x), tf.logical_not(_equals_itself(x - x)))


TESTS_FOR_NAN: dict[str, Callable[..., tf.Tensor]] = {
    "is_nan": lambda x, name=None: tf.not_equal(x, x),
    "is_finite": lambda x, name=None: _equals_itself(x - x),
    "is_inf": _is_infinite,
}
"""Maps an operation to a function that compares `x` with itself. Only NaN differs from itself."""

_REPLACES = READS_SHAPES.union(("where", "multiply_no_nan"))
"""Operations that can replace NaN by another value."""

_COMPUTES = ("add", "subtract", "multiply", "divide", "cast")
_COMPUTING_LAYERS = (layers.Normalization, layers.Rescaling)
"""Layers that return NaN if they read NaN, like the operations in `_COMPUTES`."""


def find_nan_handling(graph: Graph) -> dict[Value, list[Call]]:
    """Returns {input: calls} for the inputs in which the model replaces NaN.

    Each of `calls` may read NaN. Inputs are omitted if NaN may also reach a layer such as Dense.
    """
    consumers, outputs = graph.consumers(), set(flatten_values(graph.outputs))
    found = {}
    for source in flatten_values(graph.inputs):

        def find_copies(value: Value) -> list[Value]:
            calls = filter(_keeps_nan, consumers[value])
            return [result for call in calls for result in flatten_values(call.outputs)]

        with_missing = reach([source], find_copies)
        reading = [call for value in with_missing for call in consumers[value]]
        calls = dict.fromkeys(call for call in reading if type(call.layer) is not WeightTensor)
        is_float = all(value.is_float for value in with_missing)
        is_replaced = outputs.isdisjoint(with_missing) and any(map(compares_with_itself, calls))
        if is_float and is_replaced and all(_keeps_nan(c) or _replaces_nan(c) for c in calls):
            found[source] = list(calls)
    return found


def compares_with_itself(call: Call) -> bool:
    """Returns True if a call compares a tensor with itself. The comparison detects NaN."""
    is_same = len(call.inputs) == 2 and call.inputs[0] is call.inputs[1]
    return is_same and call.inputs[0].is_float and get_kind(call) in ("equal", "not_equal")


def _replaces_nan(call: Call) -> bool:
    return compares_with_itself(call) or get_kind(call) in _REPLACES


def _keeps_nan(call: Call) -> bool:
    if _replaces_nan(call) or type(call.layer) is WeightTensor:
        return False
    computes = get_kind(call) in _COMPUTES or isinstance(call.layer, _COMPUTING_LAYERS)
    return computes or moves_elements(call)
