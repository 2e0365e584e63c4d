"""Finds values that must have zero point 0, and returns their ranges."""

from __future__ import annotations

from keras_qat.graph.calls import Graph, Value, flatten_values
from keras_qat.ops.op import SharedRange
from keras_qat.ops.registry import find_op


def center_at_zero(minimum: float, maximum: float) -> tuple[float, float]:
    """Returns the smallest range with 256 levels and the zero point 0 that contains a range."""
    limit = max(-minimum, maximum * 256 / 255)
    return -limit, limit * 127 / 128


def find_symmetric(graph: Graph) -> set[Value]:
    """Returns the values that need a symmetric range, and all values that share such a range.

    XNNPACK only multiplies two matrices if the second has zero point 0. In TensorFlow's
    interpreter, XNNPACK accepts other zero points, but computes as if they were 0.
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
