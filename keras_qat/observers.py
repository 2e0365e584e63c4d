"""Observers: what the range of a quantizer is made of, and the variables that hold it.

An observer is one range: `update` takes in a training batch, `range` says what it is now. The
variables belong to the layer that hosts the quantizer, so Keras saves them like any weight.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat import fake_quant
from keras_qat.specs import QuantSpec

__all__ = ["CurrentValue", "LastValue", "MovingAverage", "make"]


class LastValue:
    """The extremes of the last training batch (contrib's `LastValueQuantize`).

    Args:
        spec: the specification; a range per channel is one for each entry of the last axis.
        host: the layer that owns the variables.
        name: prefix of their names.
        channels: how many channels, for a range per channel.
    """

    def __init__(self, spec: QuantSpec, host: Any, name: str, channels: int | None = None) -> None:
        self.spec = spec
        self.shape = (channels,) if spec.per_channel else ()
        initial_min, initial_max = spec.initial_range or (0.0, 0.0)
        self.minimum = self._variable(host, f"{name}_min", initial_min, self.shape)
        self.maximum = self._variable(host, f"{name}_max", initial_max, self.shape)

    @staticmethod
    def _variable(host: Any, name: str, value: float, shape: tuple[int | None, ...]) -> Any:
        return host.add_weight(
            name=name,
            shape=shape,
            dtype="float32",
            initializer=tf.constant_initializer(value),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )

    def batch_range(self, x: Any) -> tuple[Any, Any]:
        """Range of one batch, zero included; below a known lower bound nothing is looked at."""
        spec = self.spec
        axes = list(range(len(x.shape) - 1)) if spec.per_channel else None
        if spec.lower_bound == 0.0 and not spec.symmetric:
            return tf.zeros(self.shape), tf.maximum(tf.reduce_max(x, axes), 0.0)
        return fake_quant.range_of(x, spec.bits, spec.symmetric, spec.narrow_range, axes)

    def update(self, x: Any) -> tuple[Any, Any]:
        """Takes in a batch and returns the new range."""
        low, high = self.batch_range(tf.stop_gradient(x))
        return self.minimum.assign(low), self.maximum.assign(high)

    def range(self, x: Any) -> tuple[Any, Any]:
        """The range as it stands."""
        return self.minimum.read_value(), self.maximum.read_value()


class MovingAverage(LastValue):
    """Moving average of the batches' extremes, corrected for its start at zero.

    The average of the first n batches is divided by 1 - decay^n, so it starts at the first
    batch's range and needs no steps to forget an initial one. The correction is TensorFlow 1's
    (`assign_moving_average` with its default `zero_debias`), shadow variables included.
    """

    def __init__(self, spec: QuantSpec, host: Any, name: str, channels: int | None = None) -> None:
        super().__init__(spec, host, name, channels)
        self.shadows = {
            end: (
                self._variable(host, f"{name}_{end}_biased", 0.0, self.shape),
                self._variable(host, f"{name}_{end}_local_step", 0.0, ()),
            )
            for end in ("min", "max")
        }

    def update(self, x: Any) -> tuple[Any, Any]:
        low, high = self.batch_range(tf.stop_gradient(x))
        return (
            self._average(self.minimum, *self.shadows["min"], low),
            self._average(self.maximum, *self.shadows["max"], high),
        )

    def _average(self, variable: Any, biased: Any, local_step: Any, value: Any) -> Any:
        # The order of operations is TensorFlow 1's: results agree with it to the last bit.
        weight = tf.constant(1.0 - self.spec.ema_decay, tf.float32)
        new_biased = biased.assign_sub((biased.read_value() - value) * weight)
        new_step = local_step.assign_add(1.0)
        return variable.assign(new_biased / (1.0 - tf.pow(1.0 - weight, new_step)))


class CurrentValue:
    """The extremes of the tensor at hand: nothing is stored, so it is never out of date."""

    def __init__(self, spec: QuantSpec, host: Any, name: str, channels: int | None = None) -> None:
        self.spec = spec

    def range(self, x: Any) -> tuple[Any, Any]:
        """Range of `x`, zero included."""
        spec = self.spec
        return fake_quant.range_of(
            tf.stop_gradient(x), spec.bits, spec.symmetric, spec.narrow_range
        )

    update = range


def make(spec: QuantSpec, host: Any, name: str, channels: int | None = None) -> Any:
    """The observer that `spec` names, with its variables added to the layer `host`."""
    kinds = {
        "moving_average": MovingAverage,
        "last_value": LastValue,
        "current_value": CurrentValue,
    }
    return kinds[spec.observer](spec, host, name, channels)
