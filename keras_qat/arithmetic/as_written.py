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


def product(x: Any, y: Any) -> Any:
    """x * y; 0 where y is 0."""
    return tf.raw_ops.MulNoNan(x=x, y=y)


def quotient(x: Any, y: Any) -> Any:
    """x / y; 0 where y is 0."""
    x = tf.convert_to_tensor(x, dtype=getattr(y, "dtype", None))
    return tf.raw_ops.DivNoNan(x=x, y=tf.cast(y, x.dtype))
