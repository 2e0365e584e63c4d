"""Weight quantizers, the parts of a wrapper that fake-quantize one weight each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.control_flow import cond, make_switch, straight_through
from keras_qat.config.specs import QuantSpec
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.training.fake_quantization import observers
from keras_qat.training.fake_quantization.learned import fake_quantize_weights_learned
from keras_qat.training.fake_quantization.phase import Phase
from keras_qat.training.steps import step_tensors

LEAST_LIMIT = 1e-12
"""Smallest learned limit, so that no training step makes a range empty."""


class WeightQuantizer:
    """Fake-quantizes one weight of a layer, per tensor or per output channel.

    Args:
        spec: the specification. Ranges per channel are symmetric, narrow, and follow the current
            values or are learned. A range per tensor may be so too: it is that of one channel.
        host: the layer that owns the variables; the quantizer is made while `host` is built.
        name: the weight's attribute name, prefix of the variables' names.
        channel_axes: axes of the output channels, counted from the end.
    """

    def __init__(
        self, spec: QuantSpec, host: keras.layers.Layer, name: str, channel_axes: tuple[int, ...]
    ) -> None:
        self.spec = spec
        self.channel_axes = channel_axes if spec.per_channel else ()
        is_current = spec.observer == "current_value" and spec.symmetric and spec.narrow_range
        is_stored = not (spec.per_channel or is_current)
        is_learned = spec.per_channel and spec.observer == "learned"
        self.observer = observers.make(spec, host, name) if is_stored else None
        self.learned = self._learned(host, name) if is_learned and channel_axes else None
        """The limits of the channels, if training learns them."""

    def _learned(self, host: keras.layers.Layer, name: str) -> Any:
        shape = getattr(host.layer, name).shape
        rank, axes = len(shape), self.channel_axes
        return host.add_weight(
            name=f"{name}_limits",
            shape=[shape[axis] if axis in axes else 1 for axis in range(-rank, 0)],
            dtype="float32",
            initializer="ones",
        )

    def limits(self, weights: tf.Tensor) -> Any:
        """Returns the largest magnitude of each output channel, shaped to broadcast."""
        if self.spec.power_of_two:
            limits = fake_quant.channel_limits(weights, self.channel_axes)
            return fake_quant.power_of_two_limits(limits, self.spec.bits)
        if self.learned is None:
            return fake_quant.channel_limits(weights, self.channel_axes)
        return tf.maximum(tf.abs(self.learned), LEAST_LIMIT)

    def set_limits(self, limits: tf.Tensor) -> None:
        """Sets the limits if they are learned; others follow the weights."""
        if self.learned is not None:
            self.learned.assign(limits)

    def codes(self, weights: tf.Tensor) -> Any:
        """Returns the quantized values of weights in ranges that are symmetric and narrow."""
        limits = self.limits(weights)
        if self.learned is not None:
            weights = tf.clip_by_value(weights, -limits, limits)
        return fake_quant.quantize_channels(weights, limits, self.spec.bits)

    def __call__(self, weights: tf.Tensor, phase: Phase) -> Any:
        """Fake-quantizes `weights`, and observes them if this is training."""
        spec, observer = self.spec, self.observer
        weights, together = step_tensors.current().weights.get(self, (weights, None))
        weights = tf.convert_to_tensor(weights)
        if spec.preserve is not None:
            weights = PRESERVED[spec.preserve](weights)
        quantizing = phase.quantizing if spec.delayed else True
        if quantizing is False and phase.training is False:
            return weights
        if observer is not None:
            minimum, maximum = cond(
                phase.training, lambda: observer.update(weights), lambda: observer.range(weights)
            )
            return fake_quant.fake_quantize_if(
                quantizing,
                weights,
                minimum,
                maximum,
                spec.bits,
                spec.narrow_range,
                gates=step_tensors.current().gates,
            )

        if self.learned is not None:
            limits = self.limits(weights)
            return fake_quantize_weights_learned(quantizing, weights, limits, spec.bits)

        def quantized(weights: tf.Tensor) -> Any:
            return fake_quant.fake_quantize_channels(weights, self.limits(weights), spec.bits)

        if quantizing is True and together is None:
            return quantized(weights)  # It passes the gradient by itself.
        return straight_through(
            lambda weights: cond(
                make_switch(quantizing),
                lambda: quantized(weights) if together is None else together,
                lambda: tf.identity(weights),
            ),
            weights,
        )

    @property
    def stacks(self) -> bool:
        """Whether weights of several layers may be quantized side by side, along their channels."""
        is_plain = self.observer is None and self.learned is None and self.spec.preserve is None
        return is_plain and bool(self.channel_axes) and type(self) is WeightQuantizer

    def current_range(self, weights: tf.Tensor) -> tuple[Any, Any]:
        """Returns the range as numpy values: scalars, or arrays with one entry per channel."""
        if self.observer is not None:
            minimum, maximum = self.observer.range(weights)
            return minimum.numpy(), maximum.numpy()
        limits = tf.reshape(self.limits(weights), [-1]).numpy()
        return -limits, limits


class CellQuantizer(WeightQuantizer):
    """Quantizer of recurrent weights, whose ranges always follow the current values."""

    def __init__(self, spec: QuantSpec, *args: Any) -> None:
        super().__init__(dataclasses.replace(spec, observer="current_value"), *args)


class GateQuantizer(CellQuantizer):
    """Quantizer of an LSTM's weights, with one range for each gate: four blocks of columns."""

    def limits(self, weights: tf.Tensor) -> Any:
        rows, columns = weights.shape
        limits = fake_quant.channel_limits(tf.reshape(weights, [rows, 4, -1]), (-2,))
        return tf.reshape(tf.repeat(limits, columns // 4, -1), [1, columns])


def weight_at(layer: keras.layers.Layer, path: str) -> Any:
    """Returns the weight at a path inside a layer, such as `"cell.kernel"`."""
    owner, name = _owner(layer, path)
    return getattr(owner, name)


@contextlib.contextmanager
def weights_replaced(layer: keras.layers.Layer, weights: dict[str, Any]) -> Iterator[None]:
    """Runs a block in which a layer computes with other weights, given by their paths."""
    with contextlib.ExitStack() as stack:
        for path, weight in weights.items():
            owner, name = _owner(layer, path)
            weight = tf.cast(weight, owner.compute_dtype)
            stack.enter_context(backend.swap_attributes(owner, **{name: weight}))
        yield


def _owner(layer: keras.layers.Layer, path: str) -> tuple[Any, str]:
    """Returns the object that holds the weight at a path, and the name of the attribute."""
    *steps, name = path.split(".")

    def go(owner: Any, step: str) -> Any:
        return owner[int(step)] if step.isdigit() else getattr(owner, step)

    return functools.reduce(go, steps, layer), name


def _with_gradient(weights: tf.Tensor, change: Callable[[Any], Any]) -> Any:
    """Returns the weights, with a gradient that `change` computes from their own."""

    @tf.custom_gradient
    def same(weights: tf.Tensor) -> Any:
        return tf.identity(weights), change

    return same(weights)


def keep_zeros(weights: tf.Tensor) -> Any:
    """Returns the weights; zeros get no gradient."""
    return _with_gradient(weights, lambda up: up * tf.cast(weights != 0, up.dtype))


def keep_clusters(weights: tf.Tensor) -> Any:
    """Returns the weights; equal weights get the mean of their gradients, zeros none."""

    def mean(up: tf.Tensor) -> Any:
        values, clusters = tf.unique(tf.reshape(weights, [-1]))
        means = tf.math.unsorted_segment_mean(tf.reshape(up, [-1]), clusters, tf.size(values))
        shared = tf.reshape(tf.gather(means, clusters), tf.shape(up))
        return shared * tf.cast(weights != 0, up.dtype)

    return _with_gradient(weights, mean)


PRESERVED: dict[str, Callable[[Any], Any]] = {"zeros": keep_zeros, "clusters": keep_clusters}
"""Name in `QuantSpec.preserve` -> the function."""
