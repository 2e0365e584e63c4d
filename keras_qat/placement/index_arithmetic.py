"""Real numbers that become indices: what computes them stays in float."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.lowering.mask_tensors import masks_nonzero
from keras_qat.ops.op import Op
from keras_qat.ops.registry import find_op, find_row, is_on_request

COMPUTES_INDICES = "computes indices, which rounding would move"

FINDS_NUMBER = (
    "finds its mask_value before rounding, unless recipe.override('Masking', open=True) asks for "
    "integers"
)
"""Why a Masking, and the calls that compute its mask, are in float."""


def index_calls(
    calls: list[Call],
    consumers: Mapping[Value, list[Call]],
    kept: Collection[Value],
    op: Callable[[Call], Op | None],
    without_float: bool = False,
) -> set[Call]:
    """Returns the calls whose results become integers by a cut in float, and nothing else.

    So do those of a Masking that finds another number than 0.

    An index is no signal: of `tf.cast(tf.floor(16.0 * x), tf.int32)` one step of 8 bits beside a
    border names another entry, so that its error has no bound. The index of a largest value is none
    of these: rounding moves it to one that is as large but for a step.

    Args:
        calls: those of a graph, in the order of computation.
        consumers: the calls that read each value.
        kept: values that are quantized for another reason, such as the model's outputs.
        op: the operator that computes a call in integers; None for a call in float.
        without_float: whether comparisons that indices are made of may be in integers.
    """
    cuts: set[Call] = set()
    finders = {call.layer for call in calls if masks_nonzero(call)}
    for call in reversed(calls):
        outputs, row = flatten_values(call.outputs), op(call)
        is_cut = is_table(call) or cuts_in_float(call, row) or call.source in finders
        readers = [reader for value in outputs for reader in consumers[value]]
        is_before = readers and cuts.issuperset(readers) and not set(outputs).intersection(kept)
        chooses = row is not None and (makes_integers(call) or (without_float and compares(call)))
        if is_cut or (is_before and not chooses and not (row and row.is_weighted)):
            cuts.add(call)
    return {
        call
        for call in cuts
        if call.source in finders or (op(call) is not None and not is_table(call))
    }


def cuts_in_float(call: Call, row: Op | None) -> bool:
    """Returns whether a call makes integers of real numbers in float.

    Args:
        call: the call.
        row: the operator that computes it in integers; None for a call in float.
    """
    may_be_asked_for = find_op(call) is None or is_on_request(call.layer)
    return makes_integers(call) and row is None and may_be_asked_for


def makes_integers(call: Call) -> bool:
    """Returns whether a call makes integers, truth values aside, of real numbers."""
    types = [tf.as_dtype(value.dtype) for value in flatten_values(call.outputs)]
    return any(value.is_float for value in call.inputs) and all(t.is_integer for t in types)


def compares(call: Call) -> bool:
    """Returns whether a call makes truth values alone."""
    return all(tf.as_dtype(value.dtype).is_bool for value in flatten_values(call.outputs))


def is_table(call: Call) -> bool:
    """Returns whether a layer's weights are a table, also where kernels do not take the call."""
    row = find_row(call.layer)
    return row is not None and row.is_table
