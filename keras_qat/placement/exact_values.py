"""Finds tensors that must keep their exact values: indices, masked values and labels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.facts import reach
from keras_qat.lowering.mask_tensors import masks_nonzero
from keras_qat.ops.op import Op
from keras_qat.ops.registry import find_op, find_row

COMPUTES_INDICES = "computes indices, which rounding would change"

FINDS_NUMBER = (
    "compares with its mask_value before rounding, unless recipe.override('Masking', open=True) "
    "asks for integers"
)
"""The reason why a Masking stays in float."""


def find_index_calls(
    calls: list[Call],
    consumers: Mapping[Value, list[Call]],
    kept: Collection[Value],
    get_op: Callable[[Call], Op | None],
    without_float: bool = False,
) -> set[Call]:
    """Returns the calls that must stay in float because they compute indices.

    For example, `tf.cast(tf.floor(16.0 * x), tf.int32)` is an index. If `x` were rounded to int8,
    the index could point to an unrelated entry. An argmax may read int8 values, because it can only
    confuse entries that are almost equal. A Masking with a nonzero mask value also stays in float,
    because it compares exact values.

    Args:
        kept: values that must be quantized for other reasons, such as the model's outputs.
        get_op: function that returns the operator of an integer call, or None for a float call.
        without_float: whether the target lacks float. Comparisons may then be computed in integers.
    """
    found: set[Call] = set()
    maskings = {call.layer for call in calls if masks_nonzero(call)}
    for call in reversed(calls):
        outputs, op = flatten_values(call.outputs), get_op(call)
        is_end = is_table(call) or converts_in_float(call, op) or call.source in maskings
        readers = [reader for value in outputs for reader in consumers[value]]
        is_before = readers and found.issuperset(readers) and not set(outputs).intersection(kept)
        chooses = makes_integers(call) or (without_float and makes_bools(call))
        can_be_integer = op is not None and (chooses or op.is_weighted)
        if is_end or (is_before and not can_be_integer):
            found.add(call)
    return {
        call
        for call in found
        if call.source in maskings or (get_op(call) is not None and not is_table(call))
    }


def converts_in_float(call: Call, op: Op | None) -> bool:
    """Returns True if a call converts float values to integers and has no integer operator."""
    return makes_integers(call) and op is None and find_op(call) is None


def makes_integers(call: Call) -> bool:
    """Returns whether a call computes integers from float values. Booleans do not count."""
    types = [tf.as_dtype(value.dtype) for value in flatten_values(call.outputs)]
    return any(value.is_float for value in call.inputs) and all(t.is_integer for t in types)


def makes_bools(call: Call) -> bool:
    return all(tf.as_dtype(value.dtype).is_bool for value in flatten_values(call.outputs))


def is_table(call: Call) -> bool:
    """Returns whether a layer looks up rows of its weights, as Embedding does."""
    row = find_row(call.layer)
    return row is not None and row.is_table


def may_be_labels(value: Value, graph: Graph, get_op: Callable[[Call], Op | None]) -> bool:
    """Returns True if an input may contain labels. Labels must not be rounded.

    An input may contain labels if integer layers depend on other inputs, but not on this one.
    For example, a custom loss layer compares labels with predictions.
    """
    consumers = graph.consumers(losses=False)

    def find_float_results(x: Value) -> list[Value]:
        return [y for c in consumers[x] if get_op(c) is None for y in flatten_values(c.outputs)]

    def reaches_integers(value: Value) -> bool:
        return any(get_op(c) for x in reach([value], find_float_results) for c in consumers[x])

    others = map(reaches_integers, flatten_values(graph.inputs))
    return bool(consumers[value]) and not reaches_integers(value) and any(others)
