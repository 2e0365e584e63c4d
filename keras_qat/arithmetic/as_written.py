"""Products and quotients of floats that TensorFlow's graph optimization leaves as they are written.

It replaces `1 / x` by an approximate `Reciprocal`, a division by a constant by a product with its
inverse, and multiplies the smaller tensors of a chain of products first. Each rounds differently
from the same code outside of a graph, and so from kernels. Where results are
rounded, these functions compute what is written: no optimization knows their operations, which
differ from `x * y` and `x / y` for a `y` of zero only.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util


def product(x: Any, y: Any) -> Any:
    """Computes x * y; 0 where y is 0."""
    x = tf.convert_to_tensor(x, dtype=getattr(y, "dtype", None))
    if x.dtype == tf.float32 and is_in_xla():
        # XLA would join it with a sum behind it. In float64 it is exact, and then rounded.
        return tf.cast(tf.cast(x, tf.float64) * tf.cast(y, tf.float64), tf.float32)
    return tf.raw_ops.MulNoNan(x=x, y=y)


def quotient(x: Any, y: Any) -> Any:
    """Computes x / y; 0 where y is 0."""
    x = tf.convert_to_tensor(x, dtype=getattr(y, "dtype", None))
    y = tf.cast(y, x.dtype)
    if x.dtype == tf.float32 and is_in_xla():
        # XLA multiplies by 1 / y where y is constant, and on GPUs a fourth of its quotients is a
        # last bit off. In float64 a product with 1 / y is near enough to be rounded as x / y is,
        # which is never closer than 2^-49 to the middle of two float32 numbers.
        wide = tf.math.divide_no_nan(tf.ones([], tf.float64), tf.cast(y, tf.float64))
        return tf.cast(tf.raw_ops.MulNoNan(x=tf.cast(x, tf.float64), y=wide), x.dtype)
    return tf.raw_ops.DivNoNan(x=x, y=y)


def hide_constant(number: float) -> Any:
    """Returns a float32 number as a tensor that graph optimization does not know.

    It would move it: `(x - y) - 0.5` becomes `x - (y + 0.5)`, and a division by it a product with
    its inverse, which round differently.
    """
    if tf.executing_eagerly():
        return tf.constant(number)
    return tf.raw_ops.PlaceholderWithDefault(input=tf.constant(number), shape=[])


def is_in_xla() -> bool:
    """Whether XLA compiles the graph that is being traced, as with `jit_compile=True`."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph)


def must_not_fuse() -> bool:
    """Whether a product and the sum behind it may become one operation that rounds only once.

    XLA does so, and so do kernels that are compiled for GPUs. A `product` stays alone.
    """
    return is_in_xla() or has_gpu()


def has_gpu() -> bool:
    """Whether operations may run on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))
