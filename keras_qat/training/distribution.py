"""Training on several replicas (`tf.distribute`): all observe the same.

Each replica sees its part of the batch. What they take from it - ranges, the moving statistics of
BatchNormalization - becomes the mean of all within the training step. So every replica holds the
numbers that are exported, and one can be read without asking the others: on a cluster that would
be a collective, for which the others would have to do the same at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

__all__ = ["agree", "mean_over_replicas", "moments_of_all", "observed_alike", "strategy_scope"]


def mean_over_replicas(*tensors: Any) -> Any:
    """What each replica of a `tf.distribute` strategy has seen becomes the mean of all."""
    context = _several()
    if context is None:
        return tensors
    return context.all_reduce(tf.distribute.ReduceOp.MEAN, tensors)


def moments_of_all(mean: Any, variance: Any, count: Any) -> tuple[Any, Any, Any]:
    """Mean, variance and number of the values of all replicas from those of each."""
    context = _several()
    if context is None:
        return mean, variance, count
    sums = mean * count, (variance + mean**2) * count, count
    total, squares, count = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
    mean = total / count
    return mean, squares / count - mean**2, count


def agree(weights: Iterable[Any]) -> None:
    """Gives what layers of Keras observed the mean of all replicas; at the end of a step.

    A moving average is linear: that of the means is the mean of the averages.
    """
    if _several() is None:
        return
    observed = [each for each in weights if _is_observed(each)]
    if observed:
        means = mean_over_replicas(*(each.read_value() for each in observed))
        for variable, mean in zip(observed, means, strict=True):
            variable.assign(mean)


def observed_alike() -> AbstractContextManager[None]:
    """A scope for making layers whose observations will `agree`: any replica's are read for all."""

    def create(make: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("aggregation") == tf.VariableAggregation.MEAN and (
            kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        ):
            kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return make(**kwargs)

    return tf.variable_creator_scope(create)


def strategy_scope(model: Any) -> AbstractContextManager[Any]:
    """The scope of the strategy that a model was made in, if none is entered."""
    if tf.distribute.has_strategy():
        return contextlib.nullcontext()
    return model.distribute_strategy.scope()


def _several() -> Any:
    """The context of a replica that is one of several, else None."""
    context = tf.distribute.get_replica_context()
    return None if context is None or context.num_replicas_in_sync == 1 else context


def _is_observed(weight: Any) -> bool:
    return (
        weight.synchronization == tf.VariableSynchronization.ON_READ
        and weight.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        and weight.dtype.is_floating
    )
