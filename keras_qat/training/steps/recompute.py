"""Recomputes products in the gradient of fake quantization, to save memory.

The gradient of fake quantization reads the input. If the input is a product `a * b`, training would
store `a`, `b` and the product. Instead, the gradient computes the product again.

For a swish, `x * sigmoid(x)`, training would store four more tensors: the quantized input, the
sigmoid before and after quantization, and the product. Instead, only the derivative is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from keras_qat.arithmetic.gradient_masks import zero_outside_range

Back = Callable[[tf.Tensor], list[tf.Tensor]]
"""A function that converts the gradient of an output to the gradients of the inputs."""


class Source(NamedTuple):
    """How the gradient of fake quantization gets its input `x` without storing it.

    Args:
        inputs: the tensors from which `x` was computed. They receive the gradient.
        again: function that computes `x` again, and returns `x` and a `Back`.
        derivative: if `again` is None, the derivative of `x` with respect to the single input.
    """

    inputs: list[tf.Tensor]
    again: Callable[[], tuple[tf.Tensor, Back]] | None
    derivative: tf.Tensor | None = None


def find_source(x: tf.Tensor) -> Source | None:
    """Returns the `Source` of `x` if it is a product in a graph. Otherwise returns None."""
    if tf.executing_eagerly() or x.op.type != "Mul" or x.dtype != tf.float32:
        return None
    a, b = x.op.inputs
    for value, factor in ((a, b), (b, a)):
        gate = _find_quantizer(factor)
        if gate is not None and _is_sigmoid_of(value, gate):
            return _find_swish(value, factor, gate)
    return Source([a, b], lambda: (a * b, lambda up: _find_product_gradients(up, a, b)))


def _is_sigmoid_of(y: tf.Tensor, gate: tf.Operation) -> bool:
    """Return True if `gate` fake-quantizes the sigmoid of `y` to a constant range."""
    sigmoid = gate.inputs[0].op
    is_known = all(tf.get_static_value(end) is not None for end in gate.inputs[1:])
    return is_known and sigmoid.type == "Sigmoid" and sigmoid.inputs[0] is y


def _find_swish(y: tf.Tensor, quantized: tf.Tensor, gate: tf.Operation) -> Source:
    """Return the source of `y * sigmoid(y)`. The operation `gate` fake-quantizes the sigmoid.

    If `y` is itself the fake-quantized `x`, the derivative is usually with respect to `x`.
    """
    sigmoid = gate.inputs[0]
    low, high = (float(tf.get_static_value(end)) for end in gate.inputs[1:])
    inside = tf.raw_ops.FakeQuantWithMinMaxArgsGradient(
        gradients=y, inputs=sigmoid, min=low, max=high, num_bits=gate.get_attr("num_bits")
    )
    derivative = quantized + tf.raw_ops.SigmoidGrad(y=sigmoid, dy=inside)
    op = _find_quantizer(y)
    # A learned range is also an input of the operation.
    if (
        op is None
        or len(y.op.inputs) != 2
        or op.inputs[0].op.type == "Mul"
        or tf.get_static_value(op.inputs[1]) == 0.0
    ):
        return Source([y], None, derivative)
    x, minimum, maximum = op.inputs
    bits, narrow_range = op.get_attr("num_bits"), op.get_attr("narrow_range")
    return Source(
        [x], None, zero_outside_range(derivative, x, minimum, maximum, bits, narrow_range)
    )


def _find_quantizer(y: tf.Tensor) -> tf.Operation | None:
    if y.op.type != "IdentityN" or y.value_index:  # Custom gradients end in an identity.
        return None
    op = y.op.inputs[0].op
    return op if op.type == "FakeQuantWithMinMaxVars" else None


def _find_product_gradients(up: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> list[tf.Tensor]:
    """Return the gradients of `a` and `b` in `a * b`. The factors may be broadcast."""
    if a.shape.rank is not None and a.shape.as_list() == b.shape.as_list():
        return [up * b, up * a]
    axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(a), s1=tf.shape(b))
    return [
        tf.reshape(tf.reduce_sum(up * other, axis), tf.shape(factor))
        for factor, other, axis in zip((a, b), (b, a), axes, strict=True)
    ]
