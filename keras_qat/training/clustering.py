"""Clustering: a callback that lets the weights of a layer share a few values."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.io.counts import check_count
from keras_qat.keras2.backend import make_tf_function
from keras_qat.training.float_weights import weights_of
from keras_qat.training.steps.between_steps import StepCallback

__all__ = ["Cluster"]

ROUNDS = 20
"""Rounds of k-means, after which next to no weight changes its cluster."""


class Cluster(StepCallback):
    """Gives the weights of each layer of a float model a few shared values, which `fit` trains.

    At the first step weights are assigned to clusters by k-means. From then on each cluster is
    trained as one weight, by the mean of the changes of its members; as those partly cancel, take
    a learning rate about ten times that of fine-tuning. Weights that are zero, as after `Prune`,
    stay zero. Quantize the model afterwards with a recipe that preserves clusters:
    `recipes.int8().preserve("clusters")`. Compressed files get smaller, files themselves do not.

    Args:
        clusters: the number of values in each layer, 2 or more; zeros of a pruned layer count as
            one of them.
        begin: the first step with clusters, counted from 0.
        layers: names of the layers to cluster; None for all with weights.

    Raises:
        ValueError: on fewer than 2 clusters; at `fit` if the model is quantized already, or has no
            such layer.

    Example:
        >>> model.fit(x, y, callbacks=[keras_qat.callbacks.Cluster(16)])
        >>> recipe = keras_qat.recipes.int8().preserve("clusters")
        >>> qat = keras_qat.quantize_model(model, recipe)
    """

    def __init__(
        self, clusters: int = 16, *, begin: int = 0, layers: list[str] | None = None
    ) -> None:
        super().__init__()
        self.clusters = check_count("clusters", clusters, least=2)
        self.begin, self.layers = check_count("begin", begin, least=0), layers
        self._step = 0
        self._members: list[tuple[Any, Any]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._step, self._members = 0, []
        weights_of(self.model, self.layers)  # Raises errors before the first step.
        self._share = make_tf_function(self._share_all)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._step >= self.begin and not self._members:
            for weight, _ in weights_of(self.model, self.layers):
                members = assigned(weight.numpy().reshape(-1), self.clusters)
                self._members.append((weight, tf.constant(members, tf.int32)))
            self._share()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step += 1
        if self._members:
            self._share()

    def _share_all(self) -> None:
        """Gives the members of each cluster their mean; cluster 0 is that of zeros."""
        for weight, members in self._members:
            means = tf.math.unsorted_segment_mean(
                tf.reshape(weight, [-1]), members, self.clusters + 1
            )
            means = tf.concat([tf.zeros_like(means[:1]), means[1:]], 0)
            weight.assign(tf.reshape(tf.gather(means, members), tf.shape(weight)))


def assigned(weights: np.ndarray, clusters: int) -> np.ndarray:
    """Returns the cluster of each weight, from 1 on, by k-means; 0 for weights that are zero."""
    members = np.zeros(weights.shape, np.int32)
    values = weights[weights != 0]
    if not values.size:
        return members
    count = clusters - 1 if values.size < weights.size else clusters
    centers = np.quantile(values, (np.arange(count) + 0.5) / count)
    for _ in range(ROUNDS):
        nearest = np.searchsorted((centers[1:] + centers[:-1]) / 2, values)
        sums = np.bincount(nearest, values, count)
        sizes = np.bincount(nearest, minlength=count)
        centers = np.sort(np.where(sizes > 0, sums / np.maximum(sizes, 1), centers))
    members[weights != 0] = 1 + np.searchsorted((centers[1:] + centers[:-1]) / 2, values)
    return members
