"""Learned rounding (AdaRound): each weight goes up or down, whichever serves the layer's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_qat import fake_quant
from keras_qat.keras2.backend import one_at_a_time, swapped, traced
from keras_qat.layers import per_tensor
from keras_qat.post_training.bias import mean_of, shift_output
from keras_qat.post_training.sweep import IN_FLOAT, QUANTIZED, before_activation, sweep
from keras_qat.ranges.weights import least_squares_limits
from keras_qat.schedule import recipe_of

__all__ = ["learn_rounding"]

_BATCH = 32
"""Examples of a step, at most."""
_NUMBERS = 2**20
"""Of a layer's output that a step reads: of large images fewer examples tell as much."""
_STRETCH = 1.2
"""A sigmoid that reaches 0 and 1: stretched, then clipped."""
_SHARP = 20.0, 2.0
"""The power of the regularization, at the start and at the end: it grows sharper meanwhile."""
_WARM = 0.2
"""Share of the steps without regularization."""
_WEIGHT = 1.0
"""Of the regularization, where rounding to the nearest has the error 1."""


@one_at_a_time
def learn_rounding(
    model: Any,
    data: Any,
    steps: int | None = None,
    batch_size: int | None = None,
    *,
    iterations: int = 500,
    learning_rate: float = 0.02,
    weights: Literal["mse", "minmax"] = "mse",
    seed: int = 0,
    verbose: int = 0,
) -> None:
    """Learns which way to round each weight, from a few hundred examples without labels.

    Rounding to the nearest is best for a weight by itself, not for the sum that it is part of. From
    the first layer to the last, the rounding is learned with which a layer's output comes nearest
    to that of the float model, its input being what the layers before it give by then. Weights move
    onto the levels that were found: `predict`, files and `simulate` follow, and training may go on.
    Biases are corrected as by `bias_correction`. Pays with fewer than 8 bits, most with 4 or less.

    A layer keeps its rounding to the nearest where that is better on the data. Layers that are
    called several times do, too.

    Args:
        model: a calibrated quantization-aware model; its weights change. Zeros that its recipe
            preserves stay.
        data, steps, batch_size: as in `calibrate`: a few hundred examples, all held in memory.
        iterations: steps for each layer, of 32 examples, or fewer where outputs are large.
        learning_rate: of Adam.
        weights: ranges of the weights: those of the least squared error, or their extremes.
        seed: of the order of the examples.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model is not quantized or calibrated, or by `recipes.contrib`, or the
            data is not what it takes.

    Example:
        >>> qat = keras_qat.quantize_model(model, "int4_weights")
        >>> keras_qat.calibrate(qat, x_train[:256], method="mse")
        >>> keras_qat.learn_rounding(qat, x_train[:256], verbose=1)

    Source: Nagel et al. 2020 (arXiv:2004.10568).
    """
    if weights not in ("mse", "minmax"):
        raise ValueError(f"weights={weights!r}: use 'mse' or 'minmax'.")
    recipe = recipe_of(model)
    if recipe is not None and recipe.fold == "correction":
        raise ValueError(
            f"Recipe '{recipe.name}' has weights in the range that training gave them; rounding is "
            f"learned of those in a range of their own, as of recipes.int4_weights()."
        )
    numbers = np.random.default_rng(seed)

    def learn(wrapper: Any, in_float: list[Any], quantized: list[Any]) -> None:
        if not wrapper.weight_quantizers or len(wrapper.weight_axes) != 1:
            return
        wanted = [before_activation(wrapper, x, IN_FLOAT) for x in in_float]
        layer = _Layer(wrapper, weights)
        x, y = tf.concat(quantized, 0), tf.concat(wanted, 0)
        layer.learn(x, y, iterations, learning_rate, int(numbers.integers(2**31)))
        found = mean_of([before_activation(wrapper, x, QUANTIZED) for x in quantized])
        shift_output(wrapper, mean_of(wanted) - found)

    options = {"steps": steps, "batch_size": batch_size, "verbose": verbose}
    sweep(model, data, learn, "Learned rounding", **options)  # type: ignore[arg-type]


class _Layer:
    """A wrapper whose weights lie between a level below and one above."""

    def __init__(self, wrapper: Any, ranges: str) -> None:
        self.wrapper = wrapper
        ((self.name, quantizer),) = wrapper.weight_quantizers.items()
        self.quantizer = quantizer
        self.weights = getattr(wrapper.layer, self.name)
        self.value, axes, bits = self.weights.numpy(), quantizer.channel_axes, quantizer.spec.bits
        folded, self.factor = self.value, np.float32(1)
        if wrapper.fold == "per_tensor":  # The range is that of the kernel with its factors.
            folded = per_tensor.folded(wrapper).numpy()
            self.factor = per_tensor.factors(wrapper).numpy()
        if ranges == "mse":
            limits = least_squares_limits(folded, axes, bits)
        else:
            limits = fake_quant.channel_limits(folded, axes).numpy()
        self.levels = 2 ** (bits - 1) - 1
        scale = limits / np.float32(self.levels)
        self.scale = scale / np.where(self.factor == 0, np.float32(1), self.factor)
        steps = np.clip(folded / scale, -self.levels, self.levels)
        # The largest weight of a channel, which its range is made of, stays at the end.
        stays = np.abs(steps) >= self.levels * (1 - 1e-6)
        if quantizer.spec.preserve == "zeros":
            stays |= self.value == 0
        self.below = np.where(stays, np.round(steps), np.floor(steps)).astype(np.float32)
        self.share = np.where(stays, 0.0, steps - self.below).astype(np.float32)
        self.free = (~stays).astype(np.float32)

    def learn(self, x: Any, y: Any, iterations: int, learning_rate: float, seed: int) -> None:
        """Finds the rounding with which `x` gives `y`, and moves the weights there."""
        nearest = np.round(self.share)
        y = self._activated(y)
        worst = self._error(nearest, x, y)
        best, least = nearest, worst
        if worst > 0:
            loss = self._loss(x, y, worst, iterations, seed)
            start = np.clip((self.share + (_STRETCH - 1) / 2) / _STRETCH, 0.01, 0.99)
            logits = _minimized(loss, np.log(start / (1 - start)), iterations, learning_rate)
            learned = np.round(_soft(logits).numpy()) * self.free
            if self._error(learned, x, y) < least:
                best = learned
        found = (self.below + best) * self.scale
        self.weights.assign(np.where(self.factor == 0, self.value, found))
        self.quantizer.set_limits(self.scale * np.float32(self.levels))

    def _output(self, up: Any, x: Any) -> Any:
        """The output, of weights that lie so far above the level below, in steps."""
        with swapped(self.wrapper.layer, **{self.name: (self.below + up) * self.scale}):
            return self._activated(before_activation(self.wrapper, x, IN_FLOAT))

    def _activated(self, y: Any) -> Any:
        activation = self.wrapper.activation
        return y if activation is None else activation(y)

    def _error(self, up: np.ndarray, x: Any, y: Any) -> float:
        up = tf.constant(up, tf.float32)
        starts = range(0, x.shape[0], _BATCH)
        sums = [
            tf.reduce_sum((self._output(up, x[i : i + _BATCH]) - y[i : i + _BATCH]) ** 2)
            for i in starts
        ]
        return float(np.sum(sums)) / x.shape[0]

    def _loss(
        self, x: Any, y: Any, unit: float, iterations: int, seed: int
    ) -> Callable[[Any, Any], Any]:
        """The error of some examples, and a growing one for weights that are between two levels."""
        count, (first, last) = int(x.shape[0]), _SHARP
        batch = min(_BATCH, count, max(1, _NUMBERS // int(np.prod(y.shape[1:]))))
        size = max(float(self.free.sum()), 1.0)

        def loss(logits: Any, step: Any) -> Any:
            up = _soft(logits)
            seeds = tf.stack([seed, step])
            places = tf.random.stateless_uniform([batch], seeds, 0, count, tf.int32)
            off = self._output(up * self.free, tf.gather(x, places)) - tf.gather(y, places)
            error = tf.reduce_sum(off**2) / (batch * unit)
            done = tf.cast(step, tf.float32) / iterations
            rest = tf.maximum(done - _WARM, 0.0) / (1 - _WARM)
            sharp = last + (first - last) * 0.5 * (1 + tf.cos(np.pi * rest))
            between = tf.reduce_sum((1 - tf.abs(2 * up - 1) ** sharp) * self.free) / size
            return error + tf.where(done < _WARM, 0.0, _WEIGHT * between)

        return loss


def _soft(logits: Any) -> Any:
    """How far up each weight is, 0 to 1."""
    return tf.clip_by_value(_STRETCH * tf.sigmoid(logits) - (_STRETCH - 1) / 2, 0.0, 1.0)


def _minimized(
    loss: Callable[[Any, Any], Any], start: np.ndarray, iterations: int, rate: float
) -> Any:
    """Where Adam takes `start`, in one graph."""
    one, other = 0.9, 0.999

    def step(i: Any, x: Any, mean: Any, square: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x, i)
        slope = tape.gradient(value, x)
        mean, square = mean + (1 - one) * (slope - mean), square + (1 - other) * (slope**2 - square)
        count = tf.cast(i + 1, tf.float32)
        change = (mean / (1 - one**count)) / (tf.sqrt(square / (1 - other**count)) + 1e-8)
        return i + 1, x - rate * change, mean, square

    def run(x: Any) -> Any:
        zeros = tf.zeros_like(x)
        state = tf.constant(0), x, zeros, zeros
        return tf.while_loop(lambda i, *_: i < iterations, step, state)[1]

    return traced(run)(tf.constant(start, tf.float32))
