"""Reconstruction: layers are rounded so that what a part of a model gives is as in float."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call, Value
from keras_qat.frontend.keras2.backend import swapped, traced
from keras_qat.training.layers import ScheduledLayer
from keras_qat.training.post_training.rounding_levels import Levels
from keras_qat.training.post_training.sweep import (
    IN_FLOAT,
    QUANTIZED,
    Part,
    Tensors,
    computed,
    walk,
)

__all__ = ["Reconstruction"]

_BATCH = 32
"""Examples of a step, at most."""
_NUMBERS = 2**20
"""Of a tensor that a step computes: of large images fewer examples tell as much."""
_STRETCH = 1.2
"""A sigmoid that reaches 0 and 1: stretched, then clipped."""
_SHARP = 20.0, 2.0
"""The power of the regularization, at the start and at the end: it grows sharper meanwhile."""
_WARM = 0.2
"""Share of the steps without regularization."""
_WEIGHT = 1.0
"""Of the regularization, where rounding to the nearest has the error 1."""


class Reconstruction:
    """A part of a model, and the rounding of its layers, which is learned together.

    Args:
        part: the calls.
        levels: those of the weights of each wrapper whose rounding is learned.
        in_float, quantized: the tensors of each batch, as a `Visit` gets them.
    """

    def __init__(
        self,
        part: Part,
        levels: dict[Any, Levels],
        in_float: list[Tensors],
        quantized: list[Tensors],
    ) -> None:
        self.part, self.levels = part, levels
        self.wanted = [value for value in part.gives if value.is_float]
        x, y = _joined(quantized, part.reads), _joined(in_float, self.wanted)
        self.count = min(int(each.shape[0]) for each in (*x, *y))
        """Of examples. Each has several rows where steps of a sequence are rows."""
        self.x, self.y = ([self._by_example(each) for each in all_] for all_ in (x, y))
        self.power = [max(float(tf.reduce_mean(each**2)), 1e-30) for each in self.y]
        self.share, self.free = (
            np.concatenate([getattr(each, name).ravel() for each in levels.values()])
            for name in ("share", "free")
        )

    def learn(self, iterations: int, learning_rate: float, seed: int) -> None:
        """Finds the roundings and moves the weights there; to the nearest where that is better.

        Args:
            iterations, learning_rate: steps of Adam, and its rate.
            seed: of the examples.
        """
        best = np.round(self.share)
        least = self._error(best)
        if least > 0:
            loss = self._loss(least, iterations, seed)
            start = np.clip((self.share + (_STRETCH - 1) / 2) / _STRETCH, 0.01, 0.99)
            logits = _minimized(loss, np.log(start / (1 - start)), iterations, learning_rate)
            learned = np.round(_soft(logits).numpy()) * self.free
            if self._error(learned) < least:
                best = learned
        for levels, up in zip(self.levels.values(), self._by_layer(best), strict=True):
            levels.settle(up.numpy())

    def _by_example(self, x: Any) -> Any:
        return tf.reshape(x, [self.count, -1, *x.shape[1:]])

    def _by_layer(self, up: Any) -> list[Any]:
        """What belongs to the weights of each layer, of a number for each weight of them all."""
        shapes = [each.share.shape for each in self.levels.values()]
        parts = tf.split(tf.cast(up, tf.float32), [int(np.prod(shape)) for shape in shapes])
        return [tf.reshape(each, shape) for each, shape in zip(parts, shapes, strict=True)]

    def _outputs(self, up: Any, x: list[Any]) -> list[Any]:
        """What the part gives, its activations quantized but for the outputs themselves.

        Args:
            up: how far each weight is above the level below, in steps.
            x: what the part reads.
        """
        tensors: Tensors = dict(zip(self.part.reads, map(_rows, x), strict=True))
        outputs: Tensors = {}
        with contextlib.ExitStack() as stack:
            for levels, each in zip(self.levels.values(), self._by_layer(up), strict=True):
                stack.enter_context(swapped(levels.layer, **levels.weights_at(each)))
            for call in self.part.calls:
                exact = computed(call, tensors, IN_FLOAT)
                outputs |= exact
                tensors |= self._quantized(call, tensors, exact)
        return [outputs[value] for value in self.wanted]

    def _quantized(self, call: Call, tensors: Tensors, exact: Tensors) -> Tensors:
        """What a call gives to those behind it, `exact` being that with its output in float."""
        layer = call.layer
        if not isinstance(layer, ScheduledLayer) or call is self.part.calls[-1]:
            return exact
        if layer not in self.levels:
            return computed(call, tensors, QUANTIZED)
        quantize = layer.output_quantizer
        if quantize is None:
            return exact
        return {value: quantize(x, QUANTIZED, ceiling=layer.ceiling) for value, x in exact.items()}

    def _largest(self) -> int:
        """Numbers in the largest tensor of an example."""
        one = [{v: _rows(x[:1]) for v, x in zip(self.part.reads, self.x, strict=True)}]
        sizes = []
        for call, (tensors,) in walk(self.part, one, IN_FLOAT):
            sizes += [int(np.prod(x.shape)) for x in computed(call, tensors, IN_FLOAT).values()]
        return max(sizes)

    def _distance(self, found: list[Any], wanted: list[Any]) -> Any:
        """Squared distance from float, in the mean square of each output: of all examples."""
        parts = zip(found, wanted, self.power, strict=True)
        sums = [
            tf.reduce_sum((tf.reshape(one, tf.shape(other)) - other) ** 2) / power
            for one, other, power in parts
        ]
        return tf.add_n(sums)

    def _error(self, up: np.ndarray) -> float:
        """That of an example on average, as quantized."""
        sums = []
        for i in range(0, self.count, _BATCH):
            x, y = ([each[i : i + _BATCH] for each in all_] for all_ in (self.x, self.y))
            sums.append(self._distance(self._outputs(up, x), y))
        return float(np.sum(sums)) / self.count

    def _loss(self, unit: float, iterations: int, seed: int) -> Callable[[Any, Any], Any]:
        """The error of some examples, and a growing one for weights that are between two levels."""
        count, (first, last) = self.count, _SHARP
        batch = min(_BATCH, count, max(1, _NUMBERS // self._largest()))
        size = max(float(self.free.sum()), 1.0)

        def loss(logits: Any, step: Any) -> Any:
            up = _soft(logits)
            seeds = tf.stack([seed, step])
            places = tf.random.stateless_uniform([batch], seeds, 0, count, tf.int32)
            x, y = ([tf.gather(each, places) for each in all_] for all_ in (self.x, self.y))
            error = self._distance(self._outputs(up * self.free, x), y) / (batch * unit)
            done = tf.cast(step, tf.float32) / iterations
            rest = tf.maximum(done - _WARM, 0.0) / (1 - _WARM)
            sharp = last + (first - last) * 0.5 * (1 + tf.cos(np.pi * rest))
            between = tf.reduce_sum((1 - tf.abs(2 * up - 1) ** sharp) * self.free) / size
            return error + tf.where(done < _WARM, 0.0, _WEIGHT * between)

        return loss


def _joined(batches: list[Tensors], values: list[Value]) -> list[Any]:
    """Tensors of all examples."""
    return [tf.concat([each[value] for each in batches], 0) for value in values]


def _rows(x: Any) -> Any:
    """The inverse of `_by_example`."""
    return tf.reshape(x, [-1, *x.shape[2:]])


def _soft(logits: Any) -> Any:
    """How far up each weight is, 0 to 1."""
    return tf.clip_by_value(_STRETCH * tf.sigmoid(logits) - (_STRETCH - 1) / 2, 0.0, 1.0)


def _minimized(
    loss: Callable[[Any, Any], Any], start: np.ndarray, iterations: int, rate: float
) -> Any:
    """Where Adam takes `start`, in one graph."""
    one, other = 0.9, 0.999

    def step(i: Any, x: Any, mean: Any, square: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
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
