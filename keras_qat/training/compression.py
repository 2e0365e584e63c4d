"""Callbacks that prune and cluster the weights of float models."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.config.arguments import answers_unknown
from keras_qat.graph.calls import Value, flatten_values
from keras_qat.graph.facts import reach
from keras_qat.graph.read_model import read_model
from keras_qat.io.counts import check_count
from keras_qat.keras2.backend import keras, make_tf_function
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.keras2.readability import is_graph_model
from keras_qat.ops.registry import find_row
from keras_qat.training.callbacks import StepCallback
from keras_qat.training.fake_quantization.weight_quantizer import get_weight
from keras_qat.training.schedule import is_quantized

__all__ = ["Cluster", "Constant", "Polynomial", "Prune"]


@dataclasses.dataclass(frozen=True)
class Constant:
    """Pruning schedule with a constant sparsity from a given training step on.

    Args:
        sparsity: share of weights that are zero, at least 0 and below 1.
        begin: the first step that prunes, counted from 0.

    Raises:
        ValueError: if the sparsity is out of range.
    """

    sparsity: float
    begin: int = 0

    def __post_init__(self) -> None:
        _check_share(self.sparsity)
        check_count("begin", self.begin, least=0)

    def __call__(self, step: int) -> float:
        return self.sparsity if step >= self.begin else 0.0


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """Pruning schedule that increases the sparsity, quickly at first and slowly at the end.

    Args:
        sparsity: share of weights that are zero at the end, at least 0 and below 1.
        begin: the first step that prunes, counted from 0.
        end: the step from which the sparsity is constant.
        initial: sparsity at `begin`.
        power: exponent of the curve; 1 for a line.

    Raises:
        ValueError: if a sparsity is out of range, or `end` is not greater than `begin`.

    Source: Zhu and Gupta 2017 (arXiv:1710.01878).
    """

    sparsity: float
    begin: int
    end: int
    initial: float = 0.0
    power: float = 3.0

    def __post_init__(self) -> None:
        _check_share(self.sparsity)
        _check_share(self.initial)
        check_count("begin", self.begin, least=0)
        check_count("end", self.end)
        if self.end <= self.begin:
            raise ValueError(f"end={self.end}: it has to be greater than begin={self.begin}.")

    def __call__(self, step: int) -> float:
        if step < self.begin:
            return 0.0
        remaining = 1.0 - min(1.0, (step - self.begin) / (self.end - self.begin))
        return self.sparsity + (self.initial - self.sparsity) * remaining**self.power


def _check_share(share: float) -> None:
    if not 0 <= share < 1:
        raise ValueError(f"sparsity={share}: pass a share of at least 0 and below 1.")


class Prune(StepCallback):
    """Sets the smallest weights of a float model to zero while `fit` trains the others.

    Biases, BatchNormalization and tables of embeddings do not change. Quantize the model
    afterwards, with a recipe that preserves zeros: `recipes.int8().preserve("zeros")`.

    Args:
        schedule: sparsity for each training step, counted from 0: a number for a constant sparsity,
            `Constant`, `Polynomial`, or any function of the step.
        pattern: "weights" prunes weights one by one, "channels" entire output channels, by their
            norm. "2:4", for example, keeps the 2 largest of each 4 weights along the input
            channels. It prunes at each step with a sparsity above 0, and skips depthwise
            convolutions and layers whose number of input channels is not a multiple of 4.
        every: number of steps after which the pruned weights are selected again. In between, zeros
            stay zeros.
        layers: names of the layers to prune. None prunes all layers with weights, but "channels"
            then skips layers that compute the model's outputs.

    Raises:
        ValueError: if the pattern is unknown, a sparsity is out of range, or `every` is below 1; at
            `fit` if the model is quantized already, or has no layer to prune.

    Example:
        >>> prune = keras_qat.callbacks.Prune(keras_qat.callbacks.Polynomial(0.8, 0, 2_000))
        >>> model.fit(x, y, callbacks=[prune])
        >>> recipe = keras_qat.recipes.int8().preserve("zeros")
        >>> qat = keras_qat.quantize_model(model, recipe)
    """

    @answers_unknown(sparsity="schedule=0.8", target_sparsity="schedule=0.8")
    def __init__(
        self,
        schedule: float | Callable[[int], float] = 0.5,
        *,
        pattern: str = "weights",
        every: int = 100,
        layers: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.schedule = schedule if callable(schedule) else Constant(schedule)
        self.every, self.layers = check_count("every", every), layers
        self._choose = _make_chooser(pattern)
        self._spares_outputs = pattern == "channels" and layers is None
        self._step = 0
        self._weights: list[tuple[Any, tuple[int, ...]]] = []
        self._masks: list[np.ndarray] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._step, self._masks = 0, []
        spared = find_output_layers(self.model) if self._spares_outputs else ()
        spared_weights = {id(weight) for layer in spared for weight in layer.weights}
        self._weights = [
            (weight, axes)
            for weight, axes in list_weights(self.model, self.layers)
            if id(weight) not in spared_weights
            and self._choose(np.ones(weight.shape), axes, 0.5) is not None
        ]
        if not self._weights:
            raise ValueError(f"No weights of '{self.model.name}' can be pruned by this pattern.")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        share = self.schedule(self._step)
        if share > 0 and (self._step % self.every == 0 or not self._masks):
            sizes = ((np.abs(weight.numpy()), axes) for weight, axes in self._weights)
            self._masks = [self._choose(size, axes, share) for size, axes in sizes]
            self._apply()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step += 1
        self._apply()

    def _apply(self) -> None:
        for (weight, _), mask in zip(self._weights, self._masks, strict=False):
            weight.assign(weight * mask)


Chooser = Callable[[np.ndarray, tuple[int, ...], float], Any]
"""A function (magnitudes, axes of output channels, sparsity) that returns a mask, which is 0 for
pruned weights and 1 for others; None if the pattern does not fit."""


def _make_chooser(pattern: str) -> Chooser:
    if pattern == "weights":
        return lambda sizes, axes, share: _mask_smallest(sizes, share)
    if pattern == "channels":
        return _mask_channels
    match = re.fullmatch(r"(\d+):(\d+)", pattern)
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(
            f"pattern={pattern!r}: use 'weights', 'channels', or a ratio such as '2:4'."
        )
    keep, block = int(match[1]), int(match[2])
    return lambda sizes, axes, share: _mask_blocks(sizes, axes, keep, block)


def _mask_smallest(sizes: np.ndarray, share: float) -> np.ndarray:
    """Return 0 for the smallest elements, up to a share of all elements, and 1 for the others."""
    mask = np.ones(sizes.size, np.float32)
    mask[np.argsort(sizes, axis=None, kind="stable")[: round(share * sizes.size)]] = 0
    return mask.reshape(sizes.shape)


def _mask_channels(sizes: np.ndarray, axes: tuple[int, ...], share: float) -> np.ndarray:
    other_axes = tuple(axis for axis in range(-sizes.ndim, 0) if axis not in axes)
    norms = np.sqrt(np.sum(sizes**2, other_axes, keepdims=True))
    return np.broadcast_to(_mask_smallest(norms, share), sizes.shape)


def _mask_blocks(sizes: np.ndarray, axes: tuple[int, ...], keep: int, block: int) -> Any:
    """Return 1 for the largest weights in each block of input channels; None if it does not fit."""
    free = [axis for axis in (-2, -1) if axis not in axes]
    if not free or sizes.shape[free[0]] % block:
        return None
    along = np.moveaxis(sizes, free[0], -1)
    blocks = along.reshape(*along.shape[:-1], -1, block)
    ranks = np.argsort(np.argsort(-blocks, axis=-1, kind="stable"), axis=-1)
    mask = (ranks < keep).astype(np.float32).reshape(along.shape)
    return np.moveaxis(mask, -1, free[0])


ROUNDS = 20
"""Iterations of k-means. After these, hardly any weight changes its cluster."""


class Cluster(StepCallback):
    """Clusters the weights of each layer of a float model, so they have only a few values.

    The first step assigns weights to clusters with k-means. After that, `fit` trains each cluster
    as one weight, which changes by the mean change of its members. These changes partly cancel, so
    use about ten times the learning rate of fine-tuning. Weights that are zero, such as after
    `Prune`, stay zero. Quantize the model afterwards with a recipe that preserves clusters:
    `recipes.int8().preserve("clusters")`. Only compressed files get smaller.

    Args:
        clusters: the number of values in each layer, at least 2. The zeros of a pruned layer are
            one value.
        begin: the first step with clusters, counted from 0.
        layers: names of the layers to cluster; None for all layers with weights.

    Raises:
        ValueError: if `clusters` is below 2; at `fit` if the model is quantized already, or has no
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
        list_weights(self.model, self.layers)  # Raises errors before the first step.
        self._share = make_tf_function(self._share_all)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._step >= self.begin and not self._members:
            for weight, _ in list_weights(self.model, self.layers):
                members = assign_clusters(weight.numpy().reshape(-1), self.clusters)
                self._members.append((weight, tf.constant(members, tf.int32)))
            self._share()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step += 1
        if self._members:
            self._share()

    def _share_all(self) -> None:
        """Replace the members of each cluster by their mean. Cluster 0 holds zeros."""
        for weight, members in self._members:
            means = tf.math.unsorted_segment_mean(
                tf.reshape(weight, [-1]), members, self.clusters + 1
            )
            means = tf.concat([tf.zeros_like(means[:1]), means[1:]], 0)
            weight.assign(tf.reshape(tf.gather(means, members), tf.shape(weight)))


def assign_clusters(weights: np.ndarray, clusters: int) -> np.ndarray:
    """Returns the cluster of each weight by k-means, from 1 on; 0 for weights that are zero."""
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


def list_weights(
    model: keras.Model, names: list[str] | None = None
) -> list[tuple[Any, tuple[int, ...]]]:
    """Returns the weights of a float model, each with the axes of its output channels.

    Raises:
        ValueError: if the model is quantized already, or has no such layers.
    """
    if is_quantized(model):
        raise ValueError(
            f"'{model.name}' is quantized already. Prune and cluster the float model, then "
            f"quantize it with a recipe that preserves the result: "
            f"recipes.int8().preserve('zeros')."
        )
    layers = [layer for layer in list_layers(model) if names is None or layer.name in names]
    if unknown := sorted({*(names or ())} - {layer.name for layer in layers}):
        raise ValueError(f"'{model.name}' has no layer {' or '.join(map(repr, unknown))}.")
    weights = [
        (get_weight(layer, name), axes)
        for layer in layers
        for name, axes in _weight_axes(layer).items()
    ]
    if not weights:
        raise ValueError(f"The selected layers of '{model.name}' have no quantized weights.")
    return weights


def find_output_layers(model: keras.Model) -> set[Any]:
    """Returns the layers that compute the model's outputs; none for a subclassed model."""
    if not is_graph_model(model):
        return set()

    def find_sources(value: Value) -> list[Value]:
        """Returns the inputs of a tensor's producer, or nothing if its weights have channels."""
        call = value.producer
        return [] if call is None or _weight_axes(call.layer) else call.inputs

    values = reach(flatten_values(read_model(model).outputs), find_sources)
    layers = [value.producer.layer for value in values if value.producer is not None]
    return {layer for layer in layers if _weight_axes(layer)}


def _weight_axes(layer: keras.layers.Layer) -> dict[str, tuple[int, ...]]:
    """Return {path of weight: axes of output channels} without tables and factors per channel."""
    op = find_row(layer)
    is_product = op is not None and op.is_weighted and not op.is_table and not op.is_affine
    return dict(op.weights) if op is not None and is_product else {}
