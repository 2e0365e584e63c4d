"""Training on several replicas (`tf.distribute`) that keep the same ranges and statistics.

Each replica computes a part of the batch. Each training step averages the ranges, and the moving
statistics of BatchNormalization, over the replicas. Any replica can then be exported.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras, make_tf_function


def mean_over_replicas(*tensors: Any) -> Any:
    context = _replica_context()
    if context is None:
        return tensors
    return context.all_reduce(tf.distribute.ReduceOp.MEAN, tensors)


def share_of_replica(rows: tf.Tensor) -> tuple[Any, int]:
    """Returns the rows of a batch that this replica should compute, and the number of replicas."""
    context = _replica_context()
    if context is None:
        return rows, 1
    count = context.num_replicas_in_sync
    return rows[context.replica_id_in_sync_group :: count], count


def run_on_replicas(
    strategy: tf.distribute.Strategy, function: Callable[..., Any], *args: Any
) -> Any:
    """Runs a function on all replicas of a strategy, and returns the result of the first.

    `function` must average its result with `mean_over_replicas`, so all results are equal.
    """
    if strategy.num_replicas_in_sync == 1:
        return function(*args)
    return strategy.experimental_local_results(strategy.run(function, args))[0]


def combine_moments(mean: tf.Tensor, variance: tf.Tensor, count: Any) -> tuple[Any, Any, Any]:
    """Combines the mean, variance and count of each replica to those of the entire batch."""
    context = _replica_context()
    if context is None:
        return mean, variance, count
    sums = mean * count, (variance + mean**2) * count, count
    total, squares, count = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
    mean = total / count
    return mean, squares / count - mean**2, count


def agree(weights: Iterable[Any]) -> None:
    """Averages moving statistics of Keras layers over the replicas, at the end of a step."""
    if _replica_context() is None:
        return
    observed = [  # Variables that were created inside `observe_alike`.
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


def observe_alike() -> AbstractContextManager[None]:
    """Returns a scope for creating layers. `agree` averages moving statistics created inside."""

    def create(make: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("aggregation") == tf.VariableAggregation.MEAN and (
            kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        ):
            kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return make(**kwargs)

    return tf.variable_creator_scope(create)


def gather_workers(model: keras.Model, values: Any) -> np.ndarray:
    """Stacks an array from each worker of a cluster, in the order of the workers.

    All workers must call this function, with arrays of the same shape. Without a cluster, the
    result only contains `values`.

    Args:
        model: the model, with the strategy of the cluster.
        values: this worker's array. The result is float64, and exact for integers up to 2^53.
    """
    own, strategy = np.asarray(values, np.float64), model.distribute_strategy
    if not is_cluster(strategy):
        return own[None]
    gathered = _gather(strategy)(tf.constant(own.reshape(-1)))
    replicas = strategy.experimental_local_results(gathered)
    of_workers = np.asarray(replicas[0])[:: len(replicas)]  # Replicas of a worker are equal.
    return of_workers.reshape(len(of_workers), *own.shape)


@functools.cache
def _gather(strategy: tf.distribute.Strategy) -> Callable[[Any], Any]:

    def on_replica(vector: tf.Tensor) -> Any:
        return tf.distribute.get_replica_context().all_gather(vector[None], axis=0)

    def gather(vector: tf.Tensor) -> Any:
        return strategy.run(on_replica, (vector,))

    return make_tf_function(gather, input_signature=[tf.TensorSpec([None], tf.float64)])


def is_cluster(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if several worker processes train together, each with a copy of the model."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def strategy_scope(model: keras.Model) -> AbstractContextManager[Any]:
    """Returns the scope of a model's strategy, or an empty context if a scope is already open."""
    if tf.distribute.has_strategy():
        return contextlib.nullcontext()
    return model.distribute_strategy.scope()


def _replica_context() -> Any:
    """Return the `ReplicaContext` of `tf.distribute`, or None if there is only one replica."""
    context = tf.distribute.get_replica_context()
    return None if context is None or context.num_replicas_in_sync == 1 else context
