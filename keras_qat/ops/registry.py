"""All operators, and which of them a call is."""

from __future__ import annotations

from typing import NamedTuple

from keras_qat.keras2.graph import Call, class_path
from keras_qat.operations import is_operation
from keras_qat.ops import elementwise, relu
from keras_qat.ops.activations import ACTIVATIONS
from keras_qat.ops.lookup import LOOKUPS
from keras_qat.ops.normalize import UNIT_NORM
from keras_qat.ops.op import Attributes, Op
from keras_qat.ops.softmax import SOFTMAX

__all__ = ["ROWS", "Match", "match", "op_of"]

ROWS: list[Op] = [
    elementwise.ADD,
    elementwise.SUBTRACT,
    elementwise.MULTIPLY,
    elementwise.MAXIMUM,
    elementwise.MINIMUM,
    relu.RELU,
    relu.LEAKY_RELU,
    relu.PRELU,
    *ACTIVATIONS,
    *LOOKUPS,
    SOFTMAX,
    UNIT_NORM,
]
"""Where several rows list a layer, the first that accepts a call has it."""


class Match(NamedTuple):
    """Which operator a call is: None, and why, for one that is computed in float."""

    op: Op | None
    attributes: Attributes
    reason: str = ""


def _lists(op: Op, call: Call) -> bool:
    layer = call.layer
    if is_operation(layer):
        return str(layer.symbol) in op.symbols
    if type(layer) in op.layers or class_path(layer) in op.paths:
        return True
    activation = getattr(layer, "activation", None)
    return type(layer).__name__ == "Activation" and any(activation is f for f in op.functions)


def match(call: Call) -> Match:
    """The operator of a call with its attributes, or why there is none."""
    reason = ""
    for op in ROWS:
        if _lists(op, call):
            attributes = op.attributes(call)
            refusal = op.accepts(call, attributes)
            if refusal is None:
                return Match(op, attributes)
            reason = reason or refusal
    return Match(None, {}, reason)


def op_of(call: Call) -> Op | None:
    """The operator of a call, None for one that is computed in float."""
    return match(call).op
