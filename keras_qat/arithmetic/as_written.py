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
    if x.dtype == tf.float32 and in_xla():
        # XLA would join it with a sum behind it. In float64 it is exact, and then rounded.
        return tf.cast(tf.cast(x, tf.float64) * tf.cast(y, tf.float64), tf.float32)
    return tf.raw_ops.MulNoNan(x=x, y=y)


def quotient(x: Any, y: Any) -> Any:
    """Computes x / y; 0 where y is 0."""
    if isinstance(y, float) and in_xla():
        # XLA multiplies by 1 / y. In float64 that is off by too little to change the result.
        x = tf.convert_to_tensor(x)
        return tf.cast(tf.cast(x, tf.float64) / y, x.dtype)
    x = tf.convert_to_tensor(x, dtype=getattr(y, "dtype", None))
    return tf.raw_ops.DivNoNan(x=x, y=tf.cast(y, x.dtype))


def in_xla() -> bool:
    """Whether XLA compiles the graph that is being traced, as with `jit_compile=True`."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph)


def must_not_fuse() -> bool:
    """Whether a product and the sum behind it may become one operation that rounds only once.

    XLA does so, and so do kernels that are compiled for GPUs. A `product` stays alone.
    """
    return in_xla() or has_gpu()


def has_gpu() -> bool:
    """Whether operations may run on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))
