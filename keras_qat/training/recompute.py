"""What a quantizer keeps for the gradient, and what it computes again instead, in known graphs.

A quantizer's gradient reads what stands in front of it. Of a product that would be one tensor more
than float keeps, of a swish four more: its input quantized, the sigmoid before and after, the
product. They follow from two that are kept in any case, by operations that take little time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

__all__ = ["Source", "source_of"]

Back = Callable[[Any], list[Any]]
"""From the gradient of a tensor to those of what it was computed from."""


class Source(NamedTuple):
    """What a tensor was computed from.

    Args:
        inputs: the tensors that its gradient goes to.
        again: computes the tensor again, and says how its gradient goes on.
    """

    inputs: list[Any]
    again: Callable[[], tuple[Any, Back]]


def source_of(x: Any) -> Source | None:
    """Where a tensor of a graph comes from, if it need not be kept: from a product."""
    if tf.executing_eagerly() or x.op.type != "Mul" or x.dtype != tf.float32:
        return None
    a, b = x.op.inputs
    for value, factor in ((a, b), (b, a)):
        gate = _quantizer_behind(factor)
        if gate is not None and _is_sigmoid_of(value, gate):
            return Source([value], partial(_swish, value, gate))
    return Source([a, b], lambda: (a * b, lambda up: _of_product(up, a, b)))


def _is_sigmoid_of(y: Any, gate: Any) -> bool:
    """Whether an operation quantizes the sigmoid of `y`, to a range that is known."""
    sigmoid = gate.inputs[0].op
    is_known = all(tf.get_static_value(each) is not None for each in gate.inputs[1:])
    return is_known and sigmoid.type == "Sigmoid" and sigmoid.inputs[0] is y


def _swish(y: Any, gate: Any) -> tuple[Any, Back]:
    """`y` times its sigmoid, quantized as the operation `gate` does."""
    quantize = _quantizer_behind(y)
    if quantize is not None and quantize.inputs[0].op.type != "Mul":  # What it reads is kept.
        y = _quantized(quantize, quantize.inputs[0])
    sigmoid = tf.sigmoid(y)
    quantized = _quantized(gate, sigmoid)
    low, high = (float(tf.get_static_value(each)) for each in gate.inputs[1:])

    def back(up: Any) -> list[Any]:
        inside = tf.raw_ops.FakeQuantWithMinMaxArgsGradient(
            gradients=up * y, inputs=sigmoid, min=low, max=high, num_bits=gate.get_attr("num_bits")
        )
        return [up * quantized + tf.raw_ops.SigmoidGrad(y=sigmoid, dy=inside)]

    return y * quantized, back


def _quantizer_behind(y: Any) -> Any:
    """The operation that quantized a tensor; None if none did."""
    if y.op.type != "IdentityN" or y.value_index:  # As custom gradients make them.
        return None
    found = y.op.inputs[0].op
    return found if found.type == "FakeQuantWithMinMaxVars" else None


def _quantized(op: Any, x: Any) -> Any:
    """What an operation that quantizes makes of `x`."""
    bits, narrow_range = op.get_attr("num_bits"), op.get_attr("narrow_range")
    minimum, maximum = op.inputs[1:]
    return tf.raw_ops.FakeQuantWithMinMaxVars(
        inputs=x, min=minimum, max=maximum, num_bits=bits, narrow_range=narrow_range
    )


def _of_product(up: Any, a: Any, b: Any) -> list[Any]:
    if a.shape.rank is not None and a.shape.as_list() == b.shape.as_list():
        return [up * b, up * a]
    axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(a), s1=tf.shape(b))
    return [
        tf.reshape(tf.reduce_sum(up * other, axis), tf.shape(one))
        for one, other, axis in zip((a, b), (b, a), axes, strict=True)
    ]
