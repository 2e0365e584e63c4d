"""Finds tensors that need zero point 0, and computes symmetric ranges."""

from __future__ import annotations

from keras_qat.graph.calls import Graph, Value, flatten_values
from keras_qat.ops.op import SharedRange
from keras_qat.ops.registry import find_op


def center_at_zero(minimum: float, maximum: float) -> tuple[float, float]:
    """Returns the smallest symmetric 8-bit range that contains `[minimum, maximum]`."""
    limit = max(-minimum, maximum * 256 / 255)
    return -limit, limit * 127 / 128


def find_symmetric(graph: Graph) -> set[Value]:
    """Returns the values that need a symmetric range, and the values that share the range.

    XNNPACK multiplies two matrices only if the second matrix has zero point 0. In TensorFlow's
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
