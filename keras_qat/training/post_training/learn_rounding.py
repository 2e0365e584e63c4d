"""Learned rounding (AdaRound): rounds each weight up or down to preserve a layer's output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.graph.calls import Call, Value
from keras_qat.helper_layers.keras_variants import has_computed_kernel
from keras_qat.io.counts import check_counts
from keras_qat.keras2.backend import keras, make_tf_function, one_at_a_time, swap_attributes
from keras_qat.training.batch_norm import fold_modes
from keras_qat.training.distribution import mean_over_replicas, run_on_replicas, share_of_replica
from keras_qat.training.fake_quantization.phase import IN_FLOAT, QUANTIZED
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.post_training.bias_correction import compute_float_means, correct
from keras_qat.training.post_training.sweep import Part, Tensors, compute_call, sweep, walk
from keras_qat.training.schedule import get_recipe
from keras_qat.training.scheduled_layer import ScheduledLayer
from keras_qat.training.weight_limits import find_least_squares_limits

_BATCH = 32
"""Maximum number of examples per training step."""
_NUMBERS = 2**20
"""Maximum number of values in a tensor. With large images, a step therefore has fewer examples."""
_STRETCH = 1.2
"""A sigmoid says how far a weight is rounded up, from 0 to 1. The sigmoid alone would never reach 0
or 1. Therefore it is stretched by this factor (to -0.1 to 1.1), and clipped."""
_SHARP = 20.0, 2.0
"""The penalty for weights between two levels has this exponent at the start and at the end."""
_WARM = 0.2
"""The penalty begins after this share of the iterations."""
_WEIGHT = 1.0
"""Weight of the penalty. The error has the weight 1 / (error of rounding to nearest)."""


@one_at_a_time
def learn_rounding(
    model: keras.Model,
    data: object,
    steps: int | None = None,
    batch_size: int | None = None,
    *,
    iterations: int = 500,
    learning_rate: float = 0.02,
    weights: Literal["mse", "minmax"] = "mse",
    reconstruct: Literal["layer", "block"] = "layer",
    seed: int = 0,
    verbose: int = 0,
) -> None:
    """Learns whether to round each weight up or down, from a few hundred examples without labels.

    Rounding to the nearest level is best for a single weight, but not for a sum of many products.
    `learn_rounding` visits layers from first to last. For each layer, it searches for the rounding
    that brings the layer's output closest to the float model's output. The layer reads the outputs
    of earlier layers with their new weights. The weights are set to the chosen levels. `predict`,
    `simulate` and files use these levels, and training can continue. Biases are also corrected,
    like in `bias_correction`. Use `learn_rounding` with fewer than 8 bits. Models with at most 4
    bits gain most.

    With `reconstruct="block"`, the layers of a residual block are learned together, with quantized
    activations in between. One layer can then compensate for another. A layer outside of residual
    blocks is a separate block. Use blocks for 2-bit weights, and for models with DepthwiseConv2D.

    A layer or block keeps rounding to nearest if this has a smaller error on the data. Layers that
    are called several times always round to nearest.

    Under a strategy, the replicas share the examples of each step. In a cluster, all workers must
    call this function with the same data. Several devices sum gradients in a different order than
    one device. A weight halfway between two levels may therefore be rounded differently.

    Args:
        model: a calibrated quantization-aware model. Its weights must be the float model's weights,
            not changed by `calibrate(..., weights="mse")` or an earlier call. The call changes the
            weights. Zeros that the recipe preserves stay zero.
        data: a few hundred inputs without labels, all held in memory: an array, a list or dict of
            arrays, a `tf.data.Dataset`, a `keras.utils.Sequence`, or a generator of batches.
        steps: number of batches to read. By default all. Required for an infinite dataset.
        batch_size: examples per batch of arrays, 32 by default.
        iterations: training steps for each layer or block. A step has 32 examples, or fewer if
            tensors are large.
        learning_rate: the learning rate of Adam.
        weights: ranges of weights: "mse" for the least squared error, "minmax" for the extremes.
        reconstruct: "layer" or "block": which weights are learned together.
        seed: the seed for the order of the examples.
        verbose: 1 shows progress.

    Raises:
        ValueError: if the model is not quantized or calibrated, its recipe is `recipes.contrib`,
            the data does not fit the model, or an option is unknown.

    Example:
        >>> qat = keras_qat.quantize_model(model, "int4_weights")
        >>> keras_qat.calibrate(qat, x_train[:256], method="mse")
        >>> keras_qat.learn_rounding(qat, x_train[:256], verbose=1)

    Source: Nagel et al. 2020 (arXiv:2004.10568); blocks: Li et al. 2021 (arXiv:2102.05426).
    """
    if weights not in ("mse", "minmax"):
        raise ValueError(f"weights={weights!r}: use 'mse' or 'minmax'.")
    if reconstruct not in ("layer", "block"):
        raise ValueError(f"reconstruct={reconstruct!r}: use 'layer' or 'block'.")
    check_counts(steps=steps, batch_size=batch_size, iterations=iterations)
    recipe = get_recipe(model)
    if recipe is not None and recipe.fold == "correction":
        raise ValueError(
            f"Recipe '{recipe.name}' sets the ranges of weights in training. learn_rounding needs "
            f"a recipe that computes these ranges from the weights, such as recipes.int4_weights()."
        )
    draw = np.random.default_rng(seed)

    def visit(part: Part, in_float: list[Tensors], quantized: list[Tensors]) -> None:
        means = compute_float_means(part, in_float)
        levels = {
            wrapper: Levels(wrapper, weights)
            for wrapper in means
            if len(wrapper.weight_quantizers) == 1 and not has_computed_kernel(wrapper.layer)
        }
        if levels:
            reconstruction = Reconstruction(part, levels, in_float, quantized)
            part_seed = int(draw.integers(2**31))
            reconstruction.learn(iterations, learning_rate, part_seed, model.distribute_strategy)
        # Layers within a block compensate for each other. Only the block's outputs are corrected.
        between = {value for call in part.alone for value in call.inputs}
        within = {call.layer for call in part.alone if call.output in between}
        correct(part, quantized, {layer: means[layer] for layer in means.keys() - within})

    blocks = reconstruct == "block"
    sweep(model, data, visit, "Learned rounding", steps, batch_size, verbose, blocks=blocks)


class Reconstruction:
    """A part of a model whose layers learn their rounding together.

    Args:
        part: one layer, or a residual block.
        levels: the levels for the weights of each wrapper.
        in_float: the inputs and outputs of the part in float, for each batch.
        quantized: the quantized inputs of the part, for each batch.
    """

    def __init__(
        self,
        part: Part,
        levels: dict[QuantizeWrapper, Levels],
        in_float: list[Tensors],
        quantized: list[Tensors],
    ) -> None:
        self.part, self.levels = part, levels
        self.outputs = [value for value in part.outputs if value.is_float]
        inputs, targets = _concatenate(quantized, part.reads), _concatenate(in_float, self.outputs)
        self.count = min(int(x.shape[0]) for x in (*inputs, *targets))
        """Number of examples. A tensor may have several rows per example, such as the steps of a
        sequence, merged into the first axis."""
        self.inputs = [self._group_by_example(x) for x in inputs]
        self.targets = [self._group_by_example(y) for y in targets]
        self.power = [max(float(tf.reduce_mean(y**2)), 1e-30) for y in self.targets]
        self.share = np.concatenate([weights.share.ravel() for weights in levels.values()])
        self.free = np.concatenate([weights.free.ravel() for weights in levels.values()])

    def learn(
        self, iterations: int, learning_rate: float, seed: int, strategy: tf.distribute.Strategy
    ) -> None:
        """Learns the rounding and applies it, unless rounding to nearest is better.

        Args:
            iterations, learning_rate: the number of steps of Adam, and its learning rate.
            seed: the seed for the choice of examples.
            strategy: the strategy of the model. Its replicas share the examples of a step.
        """
        best = np.round(self.share)
        least = self._error(best)
        if least > 0:
            loss = self._loss(least, iterations, seed)
            start = np.clip((self.share + (_STRETCH - 1) / 2) / _STRETCH, 0.01, 0.99)
            start = np.log(start / (1 - start))
            logits = _minimize(loss, start, iterations, learning_rate, strategy)
            learned = np.round(_soft(logits).numpy()) * self.free
            if self._error(learned) < least:
                best = learned
        for levels, up in zip(self.levels.values(), self._split_by_layer(best), strict=True):
            levels.settle(up.numpy())

    def _group_by_example(self, x: tf.Tensor) -> Any:
        return tf.reshape(x, [self.count, -1, *x.shape[1:]])

    def _split_by_layer(self, up: tf.Tensor) -> list[Any]:
        shapes = [levels.share.shape for levels in self.levels.values()]
        parts = tf.split(tf.cast(up, tf.float32), [int(np.prod(shape)) for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def _compute(self, up: tf.Tensor, inputs: list[Any]) -> list[Any]:
        """Compute the outputs of the part, with quantized activations inside.

        Args:
            up: how far each weight is rounded up, from 0 (level below) to 1 (level above).
            inputs: the tensors that the part reads, grouped by example.
        """
        tensors: Tensors = dict(zip(self.part.reads, map(_rows, inputs), strict=True))
        outputs: Tensors = {}
        with contextlib.ExitStack() as stack:
            for levels, part in zip(self.levels.values(), self._split_by_layer(up), strict=True):
                stack.enter_context(swap_attributes(levels.layer, **levels.weights_at(part)))
            for call in self.part.calls:
                exact = compute_call(call, tensors, IN_FLOAT)
                outputs |= exact
                tensors |= self._quantize(call, tensors, exact)
        return [outputs[value] for value in self.outputs]

    def _quantize(self, call: Call, tensors: Tensors, exact: Tensors) -> Tensors:
        """Return the quantized outputs of a call, given the float outputs `exact`."""
        layer = call.layer
        if not isinstance(layer, ScheduledLayer) or call is self.part.calls[-1]:
            return exact
        if layer not in self.levels:
            return compute_call(call, tensors, QUANTIZED)
        quantize = layer.output_quantizer
        if quantize is None:
            return exact
        return {value: quantize(x, QUANTIZED, ceiling=layer.ceiling) for value, x in exact.items()}

    def _largest(self) -> int:
        one = [{v: _rows(x[:1]) for v, x in zip(self.part.reads, self.inputs, strict=True)}]
        sizes = []
        for call, (tensors,) in walk(self.part, one, IN_FLOAT):
            sizes += [int(np.prod(x.shape)) for x in compute_call(call, tensors, IN_FLOAT).values()]
        return max(sizes)

    def _distance(self, outputs: list[Any], targets: list[Any]) -> Any:
        """Return the sum of squared errors, relative to the mean square of each target."""
        sums = [
            tf.reduce_sum((tf.reshape(output, tf.shape(target)) - target) ** 2) / power
            for output, target, power in zip(outputs, targets, self.power, strict=True)
        ]
        return tf.add_n(sums)

    def _error(self, up: np.ndarray) -> float:
        """Return the mean of `_distance` over all examples, with weights rounded by `up`."""
        sums = []
        for i in range(0, self.count, _BATCH):
            inputs = [x[i : i + _BATCH] for x in self.inputs]
            targets = [y[i : i + _BATCH] for y in self.targets]
            sums.append(self._distance(self._compute(up, inputs), targets))
        return float(np.sum(sums)) / self.count

    def _loss(self, unit: float, iterations: int, seed: int) -> Callable[[Any, Any], Any]:
        """Return the loss function: the error, plus a penalty for weights between two levels.

        Each step draws random examples, which are divided among the replicas.
        """
        count, (first, last) = self.count, _SHARP
        batch = min(_BATCH, count, max(1, _NUMBERS // self._largest()))
        size = max(float(self.free.sum()), 1.0)

        def loss(logits: tf.Tensor, step: tf.Tensor) -> Any:
            up = _soft(logits)
            seeds = tf.stack([seed, step])
            chosen = tf.random.stateless_uniform([batch], seeds, 0, count, tf.int32)
            chosen, shares = share_of_replica(chosen)
            inputs = [tf.gather(x, chosen) for x in self.inputs]
            targets = [tf.gather(y, chosen) for y in self.targets]
            outputs = self._compute(up * self.free, inputs)
            error = self._distance(outputs, targets) / (batch * unit) * shares
            done = tf.cast(step, tf.float32) / iterations
            rest = tf.maximum(done - _WARM, 0.0) / (1 - _WARM)
            sharp = last + (first - last) * 0.5 * (1 + tf.cos(np.pi * rest))
            between = tf.reduce_sum((1 - tf.abs(2 * up - 1) ** sharp) * self.free) / size
            return error + tf.where(done < _WARM, 0.0, _WEIGHT * between)

        return loss


def _concatenate(batches: list[Tensors], values: list[Value]) -> list[Any]:
    return [tf.concat([tensors[value] for tensors in batches], 0) for value in values]


def _rows(x: tf.Tensor) -> Any:
    """Invert `_group_by_example`: merge the first two axes."""
    return tf.reshape(x, [-1, *x.shape[2:]])


def _soft(logits: tf.Tensor) -> Any:
    """Return for each weight how far it is rounded up, from 0 (level below) to 1 (level above)."""
    return tf.clip_by_value(_STRETCH * tf.sigmoid(logits) - (_STRETCH - 1) / 2, 0.0, 1.0)


def _minimize(
    loss: Callable[[Any, Any], Any],
    start: np.ndarray,
    iterations: int,
    rate: float,
    strategy: tf.distribute.Strategy,
) -> Any:
    """Minimize `loss` with Adam, starting from `start`. Return the final values."""
    beta_1, beta_2 = 0.9, 0.999

    def slope_at(x: tf.Tensor, i: tf.Tensor) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(x)
            value = loss(x, i)
        (slope,) = mean_over_replicas(tape.gradient(value, x))
        return slope

    def step(i: tf.Tensor, x: tf.Tensor, mean: tf.Tensor, square: tf.Tensor) -> Any:
        slope = run_on_replicas(strategy, slope_at, x, i)
        mean += (1 - beta_1) * (slope - mean)
        square += (1 - beta_2) * (slope**2 - square)
        count = tf.cast(i + 1, tf.float32)
        change = (mean / (1 - beta_1**count)) / (tf.sqrt(square / (1 - beta_2**count)) + 1e-8)
        return i + 1, x - rate * change, mean, square

    def run(x: tf.Tensor) -> Any:
        zeros = tf.zeros_like(x)
        state = tf.constant(0), x, zeros, zeros
        return tf.while_loop(lambda i, *_: i < iterations, step, state)[1]

    return make_tf_function(run)(tf.constant(start, tf.float32))


class Levels:
    """The weights of a wrapper as integer levels: `below`, plus `share` from 0 to 1."""

    def __init__(self, wrapper: QuantizeWrapper, ranges: str) -> None:
        self.layer = wrapper.layer
        ((self.name, self.quantizer),) = wrapper.weight_quantizers.items()
        self.weights = getattr(self.layer, self.name)
        self.value = self.weights.numpy()
        axes, bits = self.quantizer.channel_axes, self.quantizer.spec.bits
        folded, self.factor = self.value, np.float32(1)
        if wrapper.fold == "per_tensor":  # The range belongs to the folded kernel.
            folded = fold_modes.fold_kernel(wrapper).numpy()
            self.factor = fold_modes.get_factors(wrapper).numpy()
        if ranges == "mse":
            limits = find_least_squares_limits(folded, axes, bits)
        else:
            limits = fake_quant.channel_limits(folded, axes).numpy()
        self.levels = 2 ** (bits - 1) - 1
        scale = limits / np.float32(self.levels)
        self.scale = scale / np.where(self.factor == 0, np.float32(1), self.factor)
        steps = np.clip(folded / scale, -self.levels, self.levels)
        # The largest weight of a channel determines the range, and must not change.
        stays = np.abs(steps) >= self.levels * (1 - 1e-6)
        if self.quantizer.spec.preserve == "zeros":
            stays |= self.value == 0
        self.below = np.where(stays, np.round(steps), np.floor(steps)).astype(np.float32)
        self.share = np.where(stays, 0.0, steps - self.below).astype(np.float32)
        self.free = (~stays).astype(np.float32)

    def weights_at(self, up: tf.Tensor) -> dict[str, Any]:
        """Returns {attribute: weights}. `up` is 0 for the level below, 1 for the level above."""
        return {self.name: (self.below + up) * self.scale}

    def settle(self, up: np.ndarray) -> None:
        """Sets the layer's weights to `weights_at(up)`, and learned limits to the range."""
        moved = self.weights_at(up)[self.name]
        self.weights.assign(np.where(self.factor == 0, self.value, moved))
        self.quantizer.set_limits(self.scale * np.float32(self.levels))
