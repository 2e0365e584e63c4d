"""Finds where a model replaces NaN, which marks missing values in its inputs.

For example, `tf.where(tf.math.is_nan(x), 0.0, x)`. Quantized values have no NaN, so these calls
read the input before it is quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.facts import reach
from keras_qat.graph.operations import READS_SHAPES, get_kind, moves_elements
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.backend import layers

REPLACES_NAN = "replaces NaN in an input before rounding, as quantized values have no NaN"
"""Why the calls that replace NaN are in float."""


def _equals_itself(x: Any) -> Any:
    return tf.equal(x, x)


def _is_infinite(x: Any, name: Any = None) -> Any:
    return tf.logical_and(_equals_itself(x), tf.logical_not(_equals_itself(x - x)))


TESTS_FOR_NAN: dict[str, Callable[..., Any]] = {
    "is_nan": lambda x, name=None: tf.not_equal(x, x),
    "is_finite": lambda x, name=None: _equals_itself(x - x),
    "is_inf": _is_infinite,
}
"""Operation -> the same, as comparisons of tensors with themselves."""

_COMPARES = ("equal", "not_equal")

_CHOOSES = ("where", "multiply_no_nan")
"""Operations whose results hold no NaN, if the model replaces it."""

_COMPUTES = ("add", "subtract", "multiply", "divide", "cast")
_COMPUTING_LAYERS = (layers.Normalization, layers.Rescaling)
"""Operations and layers that return NaN where an input is NaN, like those that move elements."""


def find_nan_handling(graph: Graph) -> dict[Value, list[Call]]:
    """Return each input in which the model replaces NaN, with the calls that may read NaN.

    An input is left out if other calls, such as a layer with a kernel, would read its NaN, too.
    """
    consumers, outputs = graph.consumers(), set(flatten_values(graph.outputs))
    found = {}
    for source in flatten_values(graph.inputs):

        def pass_on(value: Value) -> list[Value]:
            """Return the tensors with NaN where this tensor has NaN."""
            calls = filter(_passes_on, consumers[value])
            return [result for call in calls for result in flatten_values(call.outputs)]

        with_missing = reach([source], pass_on)
        reading = [call for value in with_missing for call in consumers[value]]
        calls = dict.fromkeys(call for call in reading if type(call.layer) is not WeightTensor)
        is_float = all(value.is_float for value in with_missing)
        is_replaced = outputs.isdisjoint(with_missing) and any(map(compares_with_itself, calls))
        if is_float and is_replaced and all(_passes_on(c) or _replaces(c) for c in calls):
            found[source] = list(calls)
    return found


def compares_with_itself(call: Call) -> bool:
    """Returns whether a call asks if a tensor equals itself, which NaN alone does not."""
    is_same = len(call.inputs) == 2 and call.inputs[0] is call.inputs[1]
    return is_same and call.inputs[0].is_float and get_kind(call) in _COMPARES


def _replaces(call: Call) -> bool:
    """Tell whether a call returns no NaN for NaN, if the model replaces it."""
    return compares_with_itself(call) or get_kind(call) in READS_SHAPES.union(_CHOOSES)


def _passes_on(call: Call) -> bool:
    """Tell whether a call returns NaN where its input is NaN, one value of each."""
    if _replaces(call) or type(call.layer) is WeightTensor:
        return False
    computes = get_kind(call) in _COMPUTES or isinstance(call.layer, _COMPUTING_LAYERS)
    return computes or moves_elements(call)
