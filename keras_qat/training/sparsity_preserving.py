"""Structure of weights that training preserves: zeros, and clusters of equal values.

A weight that is zero gets no gradient, and equal weights get equal gradients. So optimizers keep
them zero, or equal, and no mask need be stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def _with_gradient(weights: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the weights, with a gradient that `change` computes from their own."""

    @tf.custom_gradient
    def same(weights: Any) -> Any:
        return tf.identity(weights), change

    return same(weights)


def keep_zeros(weights: Any) -> Any:
    """Returns the weights; zeros get no gradient."""
    return _with_gradient(weights, lambda up: up * tf.cast(weights != 0, up.dtype))


def keep_clusters(weights: Any) -> Any:
    """Returns the weights; equal weights get the mean of their gradients, zeros none."""

    def mean(up: Any) -> Any:
        values, clusters = tf.unique(tf.reshape(weights, [-1]))
        means = tf.math.unsorted_segment_mean(tf.reshape(up, [-1]), clusters, tf.size(values))
        shared = tf.reshape(tf.gather(means, clusters), tf.shape(up))
        return shared * tf.cast(weights != 0, up.dtype)

    return _with_gradient(weights, mean)


PRESERVED: dict[str, Callable[[Any], Any]] = {"zeros": keep_zeros, "clusters": keep_clusters}
"""Name in `QuantSpec.preserve` -> the function."""
