"""Training on several replicas (`tf.distribute`), which all keep the same observations.

Each replica sees its part of the batch. Ranges and the moving statistics of BatchNormalization are
averaged over the replicas within the training step. So every replica holds the values that are
exported, and reading them needs no collective, which on a cluster all replicas would have to join
at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf


def mean_over_replicas(*tensors: Any) -> Any:
    """Averages tensors over the replicas of a `tf.distribute` strategy."""
    context = _replica_context()
    if context is None:
        return tensors
    return context.all_reduce(tf.distribute.ReduceOp.MEAN, tensors)


def moments_of_all(mean: Any, variance: Any, count: Any) -> tuple[Any, Any, Any]:
    """Computes mean, variance and number of the values of all replicas from those of each."""
    context = _replica_context()
    if context is None:
        return mean, variance, count
    sums = mean * count, (variance + mean**2) * count, count
    total, squares, count = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
    mean = total / count
    return mean, squares / count - mean**2, count


def agree(weights: Iterable[Any]) -> None:
    """Averages the moving averages of Keras' layers over the replicas, at the end of a step.

    Moving averages are linear, so the average of the replicas' is that of the whole batch.
    """
    if _replica_context() is None:
        return
    observed = [  # Made within `observed_alike`.
        weight
        for weight in weights
        if weight.synchronization == tf.VariableSynchronization.ON_READ
        and weight.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        and weight.dtype.is_floating
    ]
    if observed:
        means = mean_over_replicas(*(weight.read_value() for weight in observed))
        for variable, mean in zip(observed, means, strict=True):
            variable.assign(mean)


def observed_alike() -> AbstractContextManager[None]:
    """Returns a scope for making layers whose moving averages will `agree`: one replica is read."""

    def create(make: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("aggregation") == tf.VariableAggregation.MEAN and (
            kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        ):
            kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return make(**kwargs)

    return tf.variable_creator_scope(create)


def strategy_scope(model: Any) -> AbstractContextManager[Any]:
    """Returns the scope of the strategy that a model was made in, if none is entered."""
    if tf.distribute.has_strategy():
        return contextlib.nullcontext()
    return model.distribute_strategy.scope()


def _replica_context() -> Any:
    """Returns the context of a replica that is one of several, else None."""
    context = tf.distribute.get_replica_context()
    return None if context is None or context.num_replicas_in_sync == 1 else context
