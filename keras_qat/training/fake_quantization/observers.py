"""Observers, which hold the range of a quantizer and update it from the tensors in training.

`update` takes in a training batch, `range` returns the current range. The variables belong to the
layer that hosts the quantizer, so Keras saves them like any weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.control_flow import Switch
from keras_qat.arithmetic.plain_operations import is_in_xla, product
from keras_qat.arithmetic.quant_params import WIDER, widen_range
from keras_qat.config.specs import QuantSpec
from keras_qat.keras2.backend import add_scalar, keras
from keras_qat.training.distribution import mean_over_replicas
from keras_qat.training.fake_quantization.phase import Flag
from keras_qat.training.steps import step_tensors


def if_seen(seen: Flag, new: Any, old: Any) -> Any:
    """Returns `new` if a batch counts, else `old`. Not by a branch, for which GPUs would wait."""
    return new if seen is True else tf.where(seen, new, old)


def subtract_product(variable: tf.Variable, factor: tf.Tensor, x: tf.Tensor) -> Any:
    """Subtracts `factor * x` from a variable and returns the result, by one operation."""
    if is_in_xla():
        return variable.assign_sub(product(x, factor), read_value=True)
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=factor, delta=x)
    return tf.convert_to_tensor(variable)


def _variable(host: keras.layers.Layer, name: str, value: float) -> Any:
    """Adds a variable to the layer `host`. Replicas average what they observe, so all agree."""
    on_read = tf.VariableSynchronization.ON_READ
    return add_scalar(host, name, value, synchronization=on_read)


class LastValue:
    """The extremes of the last training batch (contrib's `LastValueQuantize`).

    The layer `host` owns the variables; `name` is the prefix of their names.
    """

    counter: Any = None
    """The variable that counts the observed batches, or None."""
    counters: Sequence[Any] = ()
    """The variables that `weigh` takes."""

    def __init__(self, spec: QuantSpec, host: keras.layers.Layer, name: str) -> None:
        self.spec, self.host = spec, host
        initial_min, initial_max = spec.initial_range or (0.0, 0.0)
        self.minimum = _variable(host, f"{name}_min", initial_min)
        self.maximum = _variable(host, f"{name}_max", initial_max)
        self.variables = [self.minimum, self.maximum]
        """The variables that hold the range and its counters."""

    @property
    def ignores_minimum(self) -> bool:
        """Whether the range always begins at zero, so that only the maximum is observed."""
        return self.spec.lower_bound == 0.0 and not self.spec.symmetric

    def batch_range(self, x: tf.Tensor, ceiling: float | None) -> tuple[Any, Any]:
        """Returns the range of a batch, with zero and up to `ceiling`, averaged over replicas."""
        spec, x = self.spec, tf.stop_gradient(x)
        if not self.ignores_minimum:
            low, high = fake_quant.find_range(x, spec.bits, spec.symmetric, spec.narrow_range)
        else:
            low, high = tf.zeros([]), tf.cast(tf.reduce_max(x), tf.float32)
            limit = math.inf if ceiling is None else ceiling
            high = tf.raw_ops.ClipByValue(t=high, clip_value_min=0.0, clip_value_max=limit)
        if self.is_mixed:  # `low` and `high` of NaNs may be zero. Graphs reduce `x` only once.
            ends = [tf.reduce_max] if self.ignores_minimum else [tf.reduce_max, tf.reduce_min]
            is_known = tf.reduce_all(tf.math.is_finite(tf.stack([end(x) for end in ends])))
            low, high = (tf.where(is_known, end, np.nan) for end in (low, high))
        if spec.off_ties:
            high = widen_range(low, high)
        return mean_over_replicas(low, high)

    def extremes(self) -> tuple[float, float]:
        """Returns the range as it was observed: see `QuantSpec.off_ties`."""
        low, high = float(self.minimum.numpy()), float(self.maximum.numpy())
        return low, low + (high - low) / (1 + WIDER) if self.spec.off_ties else high

    @property
    def is_mixed(self) -> bool:
        """Whether the model computes in half precision."""
        return getattr(self.host, "mixed", False)

    def update(
        self, x: tf.Tensor, ceiling: float | None = None, counts: Flag | Switch = True
    ) -> tuple[Any, Any]:
        """Observes a batch and returns the new range.

        Args:
            x: the batch.
            ceiling: the maximum of the ReLU that `x` goes into, where the quantizer computes it.
            counts: whether the batch counts: True, a scalar tensor, or a `Switch` that is on once
                the range is frozen, which then has two ends.
        """
        low, high = self.batch_range(x, ceiling)
        seen = self.is_seen(low, high, counts)
        return (
            self.minimum.assign(if_seen(seen, low, self.minimum)),
            self.maximum.assign(if_seen(seen, high, self.maximum)),
        )

    def set(self, low: float, high: float, batches: float, wider: float = WIDER) -> None:
        """Sets the range to hold two numbers and zero, as if observed in so many batches.

        With `QuantSpec.off_ties` it is wider by the share `wider`.
        """
        spec = self.spec
        ends = fake_quant.find_range(
            tf.constant([low, high]), spec.bits, spec.symmetric, spec.narrow_range
        )
        self.minimum.assign(ends[0])
        self.maximum.assign(widen_range(*ends, wider) if spec.off_ties else ends[1])

    def is_seen(self, low: tf.Tensor, high: tf.Tensor, counts: Flag | Switch) -> Any:
        """Whether a batch with the given extremes counts: True, or in half precision a tensor.

        There infinity and NaN are part of training: `LossScaleOptimizer` skips such steps.
        """
        if isinstance(counts, Switch):
            counts = tf.logical_not(counts.on)
        if not self.is_mixed:
            return counts
        return tf.logical_and(tf.math.is_finite(high - low), counts)

    def range(self, x: tf.Tensor) -> tuple[Any, Any]:
        """Returns the current range."""
        return tf.convert_to_tensor(self.minimum), tf.convert_to_tensor(self.maximum)


class _Average(LastValue):
    """What moving averages have in common: the place of a batch in an average depends on a counter.

    Args:
        decay: the decay of the average, float32.
        weigh: function of counters, decays and whether the ranges are frozen, which returns the
            counters with this batch, and what the average needs to know of it.
    """

    decay: np.float32
    weigh: staticmethod[..., tuple[Any, Any]]

    def counted(self, counter: tf.Variable, seen: Flag, frozen: Any = None) -> Any:
        """Counts a batch if it is seen, and returns what `weigh` says of it."""
        prepared = step_tensors.current().averages.pop(counter.ref(), None)
        if prepared is None:  # A second batch in the same step has another weight.
            prepared = self.weigh(tf.convert_to_tensor(counter), self.decay, frozen)
        count, weight = prepared
        counter.assign(if_seen(seen, count, counter), read_value=False)
        return weight


class MovingAverage(_Average):
    """Exponential moving average of the batches' extremes, without bias at the start.

    The n-th batch gets the weight (1 - decay) / (1 - decay^n), as in the zero-debiased average of
    `assign_moving_average`, or 10 / max(n, 100) where that is more. The average and n are stored.
    """

    weigh = staticmethod(step_tensors.average_weight)

    def __init__(self, spec: QuantSpec, host: keras.layers.Layer, name: str) -> None:
        super().__init__(spec, host, name)
        self.counter = self.batches = _variable(host, f"{name}_batches", 0.0)
        self.counters, self.decay = [self.batches], np.float32(spec.ema_decay)
        self.variables.append(self.batches)

    def set(self, low: float, high: float, batches: float, wider: float = WIDER) -> None:
        super().set(low, high, batches, wider)
        self.batches.assign(batches)

    def update(
        self, x: tf.Tensor, ceiling: float | None = None, counts: Flag | Switch = True
    ) -> tuple[Any, Any]:
        low, high = self.batch_range(x, ceiling)
        # A switch changes the weight of the batch instead.
        frozen = counts.on if isinstance(counts, Switch) else None
        seen = self.is_seen(low, high, counts if frozen is None else True)
        weight = self.counted(self.batches, seen, frozen)

        def moved(variable: tf.Variable, end: tf.Tensor) -> Any:
            change = if_seen(seen, tf.convert_to_tensor(variable) - end, 0.0)
            return subtract_product(variable, weight, change)

        minimum = self.minimum if self.ignores_minimum else moved(self.minimum, low)
        ends = tf.convert_to_tensor(minimum), moved(self.maximum, high)
        if counts is True or frozen is not None:
            return ends
        return self._alive(*ends, tf.logical_not(counts))

    def range(self, x: tf.Tensor) -> tuple[Any, Any]:
        """Returns the current range, up to 1 for a tensor that was always 0 (a dead ReLU)."""
        return self._alive(*super().range(x), self.batches > 0.0)

    def _alive(
        self, minimum: tf.Tensor, maximum: tf.Tensor, is_range: tf.Tensor
    ) -> tuple[Any, Any]:
        """Returns a range, up to 1 if the ends are equal although it `is_range` of data."""
        is_dead = tf.logical_and(is_range, tf.equal(minimum, maximum))
        if self.spec.symmetric:
            longer = 1.0 if self.spec.narrow_range else 2**self.spec.bits / (2**self.spec.bits - 2)
            minimum = tf.where(is_dead, -longer, minimum)
        return minimum, tf.where(is_dead, 1.0, maximum)


class ShadowedMovingAverage(_Average):
    """TensorFlow 1's zero-debiased moving average of the batches' extremes.

    The average of the first n batches is divided by 1 - decay^n. It is computed as TensorFlow 1
    does (`assign_moving_average` with its default `zero_debias`) and has its shadow variables, from
    which `recipes.contrib` can continue.
    """

    weigh = staticmethod(step_tensors.known_share)

    def __init__(self, spec: QuantSpec, host: keras.layers.Layer, name: str) -> None:
        super().__init__(spec, host, name)
        self.shadows = {
            end: (
                _variable(host, f"{name}_{end}_biased", 0.0),
                _variable(host, f"{name}_{end}_local_step", 0.0),
            )
            for end in ("min", "max")
        }
        self.counter = self.shadows["max"][1]
        self.counters = [counter for _, counter in self.shadows.values()]
        self.decay = np.float32(1) - np.float32(1.0 - spec.ema_decay)  # As TensorFlow 1 rounds it.
        self.variables += [*self.shadows["min"], *self.shadows["max"]]

    def set(self, low: float, high: float, batches: float, wider: float = WIDER) -> None:
        super().set(low, high, batches, wider)
        known = 1.0 - self.spec.ema_decay**batches
        for end, variable in (("min", self.minimum), ("max", self.maximum)):
            biased, local_step = self.shadows[end]
            biased.assign(known * variable.numpy())
            local_step.assign(batches)

    def update(
        self, x: tf.Tensor, ceiling: float | None = None, counts: Flag | Switch = True
    ) -> tuple[Any, Any]:
        low, high = self.batch_range(x, ceiling)
        seen = self.is_seen(low, high, counts)
        return (
            self._average(self.minimum, *self.shadows["min"], low, seen, self.ignores_minimum),
            self._average(self.maximum, *self.shadows["max"], high, seen),
        )

    def _average(
        self,
        variable: tf.Variable,
        biased: tf.Tensor,
        counter: tf.Variable,
        value: Any,
        seen: Flag,
        is_zero: bool = False,
    ) -> Any:
        known = self.counted(counter, seen)
        if is_zero:
            return tf.convert_to_tensor(variable)
        # The order of operations is TensorFlow 1's: results agree with it to the last bit.
        weight = tf.constant(1.0 - self.spec.ema_decay, tf.float32)
        change = if_seen(seen, biased.read_value() - value, 0.0)
        average = subtract_product(biased, weight, change) / known
        return variable.assign(if_seen(seen, average, variable))


class CurrentValue:
    """The extremes of the current tensor; nothing is stored."""

    counter: Any = None
    counters: Sequence[Any] = ()
    variables: tuple[Any, ...] = ()

    def __init__(self, spec: QuantSpec, host: keras.layers.Layer, name: str) -> None:
        self.spec = spec

    def range(self, x: tf.Tensor) -> tuple[Any, Any]:
        """Returns the range of `x`, zero included."""
        spec, x = self.spec, tf.stop_gradient(x)
        return fake_quant.find_range(x, spec.bits, spec.symmetric, spec.narrow_range)

    def update(
        self, x: tf.Tensor, ceiling: float | None = None, counts: Flag | Switch = True
    ) -> tuple[Any, Any]:
        """Returns the range of `x`; nothing is stored."""
        return self.range(x)


class Learned(LastValue):
    """A range that trains with the weights, starting from the range that `calibrate` sets.

    Only the magnitude of a variable counts, so that no training step can make the range empty.
    """

    def __init__(self, spec: QuantSpec, host: keras.layers.Layer, name: str) -> None:
        self.spec, self.host = spec, host
        own = {"shape": (), "dtype": "float32", "initializer": "zeros"}
        has_minimum = not (self.ignores_minimum or spec.symmetric)
        self.minimum = host.add_weight(name=f"{name}_min", trainable=has_minimum, **own)
        self.maximum = host.add_weight(name=f"{name}_max", trainable=True, **own)
        self.variables = [self.minimum, self.maximum]

    def range(self, x: tf.Tensor) -> tuple[Any, Any]:
        spec, high = self.spec, tf.abs(self.maximum.read_value())
        if spec.symmetric:
            return -high * (1.0 if spec.narrow_range else 2**spec.bits / (2**spec.bits - 2)), high
        return -tf.abs(self.minimum.read_value()), high

    def set(self, low: float, high: float, batches: float, wider: float = WIDER) -> None:
        if low == high == 0:  # Any range holds zeros alone, and an empty one would mean: no data.
            high = 1.0
        super().set(low, high, batches, wider)

    def update(
        self, x: tf.Tensor, ceiling: float | None = None, counts: Flag | Switch = True
    ) -> tuple[Any, Any]:
        """Returns the current range, which a batch changes only by its gradient."""
        return self.range(x)


def make(spec: QuantSpec, host: keras.layers.Layer, name: str) -> LastValue | CurrentValue:
    """Makes the observer that `spec` names, and adds its variables to the layer `host`."""
    return OBSERVERS[spec.observer](spec, host, name)


OBSERVERS: dict[str, type[LastValue | CurrentValue]] = {
    "moving_average": MovingAverage,
    "shadowed_moving_average": ShadowedMovingAverage,
    "last_value": LastValue,
    "current_value": CurrentValue,
    "learned": Learned,
    "learned_clipping": Learned,
}
"""Name in `QuantSpec.observer` -> class of the observer."""
