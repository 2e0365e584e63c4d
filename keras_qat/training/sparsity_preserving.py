"""What training keeps of weights: zeros, and clusters of equal values.

Both look at the weights as they are: one that is zero has no gradient, and equal ones have equal
gradients. So nothing is stored, and optimizers leave them zero, and equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["PRESERVED"]


def _with_gradient(weights: Any, change: Callable[[Any], Any]) -> Any:
    """The weights, with a gradient that is changed."""

    @tf.custom_gradient
    def same(weights: Any) -> Any:
        return tf.identity(weights), change

    return same(weights)


def keep_zeros(weights: Any) -> Any:
    """The weights; those that are zero have no gradient."""
    return _with_gradient(weights, lambda up: up * tf.cast(weights != 0, up.dtype))


def keep_clusters(weights: Any) -> Any:
    """The weights; equal ones have the mean of their gradients."""

    def mean(up: Any) -> Any:
        values, places = tf.unique(tf.reshape(weights, [-1]))
        means = tf.math.unsorted_segment_mean(tf.reshape(up, [-1]), places, tf.size(values))
        return tf.reshape(tf.gather(means, places), tf.shape(up))

    return _with_gradient(weights, mean)


PRESERVED: dict[str, Callable[[Any], Any]] = {"zeros": keep_zeros, "clusters": keep_clusters}
"""Name, as in `QuantSpec.preserve` -> the function."""
