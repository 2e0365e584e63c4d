"""Finds tensors that need the zero point 0, and computes ranges with this zero point."""

from __future__ import annotations

from keras_qat.graph.calls import Graph, Value, flatten_values
from keras_qat.ops.op import SharedRange
from keras_qat.ops.registry import find_op


def center_at_zero(minimum: float, maximum: float) -> tuple[float, float]:
    """Widens a range of floats until its int8 zero point is 0."""
    limit = max(-minimum, maximum * 256 / 255)
    return -limit, limit * 127 / 128


def find_symmetric(graph: Graph) -> set[Value]:
    """Returns the values that need zero point 0, such as the second factor of a matrix product.

    XNNPACK computes as if the zero point of this factor were 0. If the factor is the output of an
    operator that does not change the range, such as Reshape, the input also needs zero point 0.
    """
    values: set[Value] = set()
    for call in graph.calls:
        op = find_op(call)
        values.update(call.inputs[index] for index in (op.symmetric if op else ()))
    for call in reversed(graph.calls):
        op = find_op(call)
        shares_range = op is not None and isinstance(op.output, SharedRange)
        if shares_range and values.intersection(flatten_values(call.outputs)):
            values.update(call.inputs)
    return values
