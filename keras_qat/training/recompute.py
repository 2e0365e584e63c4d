"""Recomputation of cheap tensors in the backward pass, to save the memory of storing them.

The gradient of a quantizer reads the tensor in front. Behind a product this would keep one tensor
more than float training does, behind a swish four more: the quantized input, the sigmoid before
and after quantization, and the product. They follow from two tensors that are kept in any case, by
operations that take little time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

Back = Callable[[Any], list[Any]]
"""Function from the gradient of a tensor to the gradients of its inputs."""


class Source(NamedTuple):
    """The inputs of a tensor that is recomputed rather than stored.

    Args:
        inputs: the tensors that the gradient goes to.
        again: recomputes the tensor, and returns the function of its gradient too.
    """

    inputs: list[Any]
    again: Callable[[], tuple[Any, Back]]


def source_of(x: Any) -> Source | None:
    """Returns how to recompute a tensor of a graph; None unless it is a product."""
    if tf.executing_eagerly() or x.op.type != "Mul" or x.dtype != tf.float32:
        return None
    a, b = x.op.inputs
    for value, factor in ((a, b), (b, a)):
        gate = _quantizer_behind(factor)
        if gate is not None and _is_sigmoid_of(value, gate):
            return Source([value], partial(_swish, value, gate))
    return Source([a, b], lambda: (a * b, lambda up: _of_product(up, a, b)))


def _is_sigmoid_of(y: Any, gate: Any) -> bool:
    """Whether an operation quantizes the sigmoid of `y` to a constant range."""
    sigmoid = gate.inputs[0].op
    is_known = all(tf.get_static_value(end) is not None for end in gate.inputs[1:])
    return is_known and sigmoid.type == "Sigmoid" and sigmoid.inputs[0] is y


def _swish(y: Any, gate: Any) -> tuple[Any, Back]:
    """Computes `y` times its sigmoid, which is quantized as in the operation `gate`."""
    quantize = _quantizer_behind(y)
    if quantize is not None and quantize.inputs[0].op.type != "Mul":  # Its input is kept.
        y = _quantized(quantize, quantize.inputs[0])
    sigmoid = tf.sigmoid(y)
    quantized = _quantized(gate, sigmoid)
    low, high = (float(tf.get_static_value(end)) for end in gate.inputs[1:])

    def back(up: Any) -> list[Any]:
        inside = tf.raw_ops.FakeQuantWithMinMaxArgsGradient(
            gradients=y, inputs=sigmoid, min=low, max=high, num_bits=gate.get_attr("num_bits")
        )
        return [up * (quantized + tf.raw_ops.SigmoidGrad(y=sigmoid, dy=inside))]

    return y * quantized, back


def _quantizer_behind(y: Any) -> Any:
    """Returns the operation that quantized a tensor, or None."""
    if y.op.type != "IdentityN" or y.value_index:  # Custom gradients end in one.
        return None
    op = y.op.inputs[0].op
    return op if op.type == "FakeQuantWithMinMaxVars" else None


def _quantized(op: Any, x: Any) -> Any:
    """Quantizes `x` as an existing operation does."""
    bits, narrow_range = op.get_attr("num_bits"), op.get_attr("narrow_range")
    minimum, maximum = op.inputs[1:]
    return tf.raw_ops.FakeQuantWithMinMaxVars(
        inputs=x, min=minimum, max=maximum, num_bits=bits, narrow_range=narrow_range
    )


def _of_product(up: Any, a: Any, b: Any) -> list[Any]:
    """Returns the gradients of both factors of a product, which may have been broadcast."""
    if a.shape.rank is not None and a.shape.as_list() == b.shape.as_list():
        return [up * b, up * a]
    axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(a), s1=tf.shape(b))
    return [
        tf.reshape(tf.reduce_sum(up * other, axis), tf.shape(factor))
        for factor, other, axis in zip((a, b), (b, a), axes, strict=True)
    ]
