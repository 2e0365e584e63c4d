"""Pruning: a callback that sets the smallest weights to zero, more and more of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_qat.config.arguments import answers_unknown
from keras_qat.io.counts import check_count
from keras_qat.training.float_weights import output_layers, weights_of
from keras_qat.training.steps.between_steps import StepCallback

__all__ = ["Constant", "Polynomial", "Prune"]


@dataclasses.dataclass(frozen=True)
class Constant:
    """Schedule with one sparsity from a training step on.

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
    """Schedule that raises the sparsity fast at first, then slower.

    Args:
        sparsity: share of weights that are zero at the end, at least 0 and below 1.
        begin: the first step that prunes, counted from 0.
        end: the step from which on the sparsity stays.
        initial: sparsity at `begin`.
        power: exponent of the curve; 1 for a line.

    Raises:
        ValueError: if a sparsity is out of range, or `end` does not lie behind `begin`.

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
            raise ValueError(f"end={self.end}: it has to lie behind begin={self.begin}.")

    def __call__(self, step: int) -> float:
        if step < self.begin:
            return 0.0
        remaining = 1.0 - min(1.0, (step - self.begin) / (self.end - self.begin))
        return self.sparsity + (self.initial - self.sparsity) * remaining**self.power


def _check_share(share: float) -> None:
    if not 0 <= share < 1:
        raise ValueError(f"sparsity={share}: give a share of at least 0 and below 1.")


class Prune(StepCallback):
    """Sets the smallest weights of a float model to zero while `fit` trains the others.

    Biases, BatchNormalization and tables of embeddings are left alone. Quantize the model
    afterwards, with a recipe that preserves zeros: `recipes.int8().preserve("zeros")`.

    Args:
        schedule: sparsity for each training step, counted from 0: a number for the same from the
            first step on, `Constant`, `Polynomial`, or any function of the step.
        pattern: "weights" prunes weights one by one, "channels" whole output channels, by their
            norm. "2:4" keeps the 2 largest of each 4 weights along the input channels, or other
            numbers: the schedule then only says when, by values above 0. Layers whose input
            channels are no multiple of 4 are left alone, and depthwise convolutions.
        every: number of steps between choices of the weights. In between the zeros stay zeros.
        layers: names of the layers to prune; None for all with weights, with "channels" but for
            those whose channels are the model's outputs.

    Raises:
        ValueError: on an unknown pattern, a sparsity out of range, or an `every` below 1; at `fit`
            if the model is quantized already, or has no layer to prune.

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
        self._choose = _chooser(pattern)
        self._spares_outputs = pattern == "channels" and layers is None
        self._step = 0
        self._weights: list[tuple[Any, tuple[int, ...]]] = []
        self._masks: list[np.ndarray] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._step, self._masks = 0, []
        spared = output_layers(self.model) if self._spares_outputs else ()
        spared_weights = {id(weight) for layer in spared for weight in layer.weights}
        self._weights = [
            (weight, axes)
            for weight, axes in weights_of(self.model, self.layers)
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
"""Returns 1 for weights that stay and 0 for others, given magnitudes, axes of the output channels,
counted from the end, and the sparsity; None for weights that the pattern does not fit."""


def _chooser(pattern: str) -> Chooser:
    if pattern == "weights":
        return lambda sizes, axes, share: _largest(sizes, share)
    if pattern == "channels":
        return _channels
    match = re.fullmatch(r"(\d+):(\d+)", pattern)
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(f"pattern={pattern!r}: use 'weights', 'channels', or such as '2:4'.")
    keep, block = int(match[1]), int(match[2])
    return lambda sizes, axes, share: _of_blocks(sizes, axes, keep, block)


def _largest(sizes: np.ndarray, share: float) -> np.ndarray:
    """Returns 0 for this share of the numbers, the smallest ones, and 1 for the others."""
    mask = np.ones(sizes.size, np.float32)
    mask[np.argsort(sizes, axis=None, kind="stable")[: round(share * sizes.size)]] = 0
    return mask.reshape(sizes.shape)


def _channels(sizes: np.ndarray, axes: tuple[int, ...], share: float) -> np.ndarray:
    other_axes = tuple(axis for axis in range(-sizes.ndim, 0) if axis not in axes)
    norms = np.sqrt(np.sum(sizes**2, other_axes, keepdims=True))
    return np.broadcast_to(_largest(norms, share), sizes.shape)


def _of_blocks(sizes: np.ndarray, axes: tuple[int, ...], keep: int, block: int) -> Any:
    """Returns 1 for the largest of each block along the input channels; None if none fit."""
    free = [axis for axis in (-2, -1) if axis not in axes]
    if not free or sizes.shape[free[0]] % block:
        return None
    along = np.moveaxis(sizes, free[0], -1)
    blocks = along.reshape(*along.shape[:-1], -1, block)
    ranks = np.argsort(np.argsort(-blocks, axis=-1, kind="stable"), axis=-1)
    mask = (ranks < keep).astype(np.float32).reshape(along.shape)
    return np.moveaxis(mask, -1, free[0])
