"""Quantizers of weights. Their gradients can preserve zeros or clusters of weights.

The limit of an output channel is the end of its symmetric range, from -limit to limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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
"""Minimum of a learned limit, because a range must not be empty."""


class WeightQuantizer:
    """Fake-quantizes one weight of a layer, per tensor or per output channel.

    Args:
        spec: the specification. A range per channel must be symmetric and narrow (-127 to 127). The
            limit is the largest weight of the channel, or is learned.
        host: the layer that owns the variables. The quantizer is created while `host` is built.
        name: the weight's attribute name, which is also the prefix of the variables' names.
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
        self.observer = observers.make_observer(spec, host, name) if is_stored else None
        self.learned = self._add_limits(host, name) if is_learned and channel_axes else None
        """The trained limits of the channels. None if the limits follow the weights."""

    def _add_limits(self, host: keras.layers.Layer, name: str) -> tf.Variable:
        shape = getattr(host.layer, name).shape
        rank, axes = len(shape), self.channel_axes
        return host.add_weight(
            name=f"{name}_limits",
            shape=[shape[axis] if axis in axes else 1 for axis in range(-rank, 0)],
            dtype="float32",
            initializer="ones",
        )

    def limits(self, weights: tf.Tensor) -> tf.Tensor:
        """Returns the limit of each output channel, in a shape that broadcasts to the weights."""
        if self.spec.power_of_two:
            limits = fake_quant.channel_limits(weights, self.channel_axes)
            return fake_quant.power_of_two_limits(limits, self.spec.bits)
        if self.learned is None:
            return fake_quant.channel_limits(weights, self.channel_axes)
        return tf.maximum(tf.abs(self.learned), LEAST_LIMIT)

    def set_limits(self, limits: tf.Tensor) -> None:
        """Sets the limits if they are learned. Otherwise, they depend on the weights."""
        if self.learned is not None:
            self.learned.assign(limits)

    def quantize(self, weights: tf.Tensor) -> tf.Tensor:
        """Returns the weights as integers, for example -127 to 127. The range must be symmetric."""
        limits = self.limits(weights)
        if self.learned is not None:
            weights = tf.clip_by_value(weights, -limits, limits)
        return fake_quant.quantize_channels(weights, limits, self.spec.bits)

    def __call__(self, weights: tf.Tensor, phase: Phase) -> tf.Tensor:
        spec, observer = self.spec, self.observer
        weights, prepared = step_tensors.current().weights.get(self, (weights, None))
        weights = tf.convert_to_tensor(weights)
        if spec.preserve is not None:
            weights = PRESERVED[spec.preserve](weights)
        quantizing = phase.quantizing if spec.delayed else True
        if quantizing is False and phase.training is False:
            return weights
        if observer is not None:
            low, high = cond(
                phase.training, lambda: observer.update(weights), lambda: observer.range(weights)
            )
            return fake_quant.fake_quantize_if(
                quantizing, weights, low, high, spec.bits, spec.narrow_range
            )
        if self.learned is not None:
            limits = self.limits(weights)
            return fake_quantize_weights_learned(quantizing, weights, limits, spec.bits)

        def quantize(weights: tf.Tensor) -> tf.Tensor:
            if prepared is not None:
                return prepared
            return fake_quant.fake_quantize_channels(weights, self.limits(weights), spec.bits)

        if quantizing is True and prepared is None:
            return quantize(weights)  # This operation already has a gradient.
        switch = make_switch(quantizing)
        return straight_through(
            lambda weights: cond(switch, lambda: quantize(weights), lambda: tf.identity(weights)),
            weights,
        )

    @property
    def can_share_block(self) -> bool:
        """True if the weights may be concatenated with others, and quantized by one operation."""
        is_plain = self.observer is None and self.learned is None and self.spec.preserve is None
        axes = self.channel_axes
        is_last = bool(axes) and axes == tuple(range(-len(axes), 0))
        return is_plain and is_last and type(self) is WeightQuantizer

    def current_range(self, weights: tf.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of the range: scalars, or arrays with one entry per channel."""
        if self.observer is not None:
            minimum, maximum = self.observer.range(weights)
            return minimum.numpy(), maximum.numpy()
        limits = tf.reshape(self.limits(weights), [-1]).numpy()
        return -limits, limits


class CellQuantizer(WeightQuantizer):
    """Quantizer of recurrent weights. Ranges are always computed from the current weights."""

    def __init__(self, spec: QuantSpec, *args: Any) -> None:
        super().__init__(dataclasses.replace(spec, observer="current_value"), *args)


class GateQuantizer(CellQuantizer):
    """Quantizer of an LSTM's weights, with one range for each gate (a block of columns)."""

    def limits(self, weights: tf.Tensor) -> tf.Tensor:
        rows, columns = weights.shape
        limits = fake_quant.channel_limits(tf.reshape(weights, [rows, 4, -1]), (-2,))
        return tf.reshape(tf.repeat(limits, columns // 4, -1), [1, columns])


def get_weight(layer: keras.layers.Layer, path: str) -> tf.Tensor:
    """Returns the weight at a path inside a layer, such as `"cell.kernel"`."""
    owner, name = _find_owner(layer, path)
    return getattr(owner, name)


@contextlib.contextmanager
def replace_weights(layer: keras.layers.Layer, weights: dict[str, tf.Tensor]) -> Iterator[None]:
    """Replaces weights of a layer inside a `with` block. The keys of `weights` are paths."""
    with contextlib.ExitStack() as stack:
        for path, weight in weights.items():
            owner, name = _find_owner(layer, path)
            weight = tf.cast(weight, owner.compute_dtype)
            stack.enter_context(backend.swap_attributes(owner, **{name: weight}))
        yield


def _find_owner(layer: keras.layers.Layer, path: str) -> tuple[Any, str]:
    """Return the object and the attribute, such as `(layer.cell, "kernel")` for "cell.kernel"."""
    *steps, name = path.split(".")

    def enter(owner: Any, step: str) -> Any:
        return owner[int(step)] if step.isdigit() else getattr(owner, step)

    return functools.reduce(enter, steps, layer), name


Change = Callable[[tf.Tensor], tf.Tensor]


def _change_gradient(weights: tf.Tensor, change: Change) -> tf.Tensor:
    """Return the weights unchanged. In backpropagation, call `change` with the gradient."""

    @tf.custom_gradient
    def same(weights: tf.Tensor) -> tuple[tf.Tensor, Change]:
        return tf.identity(weights), change

    return same(weights)


def keep_zeros(weights: tf.Tensor) -> tf.Tensor:
    """Returns the weights unchanged. Weights that are zero get no gradient, so they stay zero."""
    return _change_gradient(weights, lambda up: up * tf.cast(weights != 0, up.dtype))


def keep_clusters(weights: tf.Tensor) -> tf.Tensor:
    """Returns the weights unchanged. Equal weights get the mean of their gradients.

    They therefore stay equal in training. Zeros get no gradient, and stay zero.
    """

    def mean(up: tf.Tensor) -> tf.Tensor:
        values, clusters = tf.unique(tf.reshape(weights, [-1]))
        means = tf.math.unsorted_segment_mean(tf.reshape(up, [-1]), clusters, tf.size(values))
        shared = tf.reshape(tf.gather(means, clusters), tf.shape(up))
        return shared * tf.cast(weights != 0, up.dtype)

    return _change_gradient(weights, mean)


PRESERVED: dict[str, Change] = {"zeros": keep_zeros, "clusters": keep_clusters}
"""Functions that change the gradient, by the value of `QuantSpec.preserve`."""
