"""Branches that training takes at run time, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["cond", "straight_through"]


def cond(predicate: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """`tf.cond` that takes the branch at once if `predicate` is known while tracing.

    The gradient of a `tf.cond` takes long to trace: where there are many, give them one by
    `tf.custom_gradient`.
    """
    if isinstance(predicate, bool):
        return true_fn() if predicate else false_fn()
    return tf.cond(predicate, true_fn, false_fn)


def straight_through(function: Callable[[Any], Any], x: Any) -> Any:
    """`function(x)` with the gradient of `x` (Bengio et al. 2013)."""

    @tf.custom_gradient
    def passes(x: Any) -> Any:
        return function(x), lambda upstream: upstream

    return passes(x)
