"""Observers, which store the range of a tensor, and update it in training.

`update` observes a training batch, and `range` returns the current range. Keras saves the
variables, because they are weights of the layer that hosts the quantizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

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

Range = tuple[tf.Tensor, tf.Tensor]
"""The lower and the upper end of a range, scalars."""

Counts: TypeAlias = bool | tf.Tensor | Switch

RECENT = 10.0
"""The weight of the n-th batch in a moving average is at least `RECENT / max(n, 100)`.

Activations often grow when training begins. With smaller weights, the range would lag behind."""


def select_seen(seen: Flag, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Selects a tensor with `tf.where`, which is faster than `tf.cond` on a GPU."""
    return new if seen is True else tf.where(seen, new, old)


def subtract_product(variable: tf.Variable, factor: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Subtracts `factor * x` from a variable with one operation, and returns the result."""
    if is_in_xla():
        return variable.assign_sub(product(x, factor), read_value=True)
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=factor, delta=x)
    return tf.convert_to_tensor(variable)


def _add_variable(host: keras.layers.Layer, name: str, value: float = 0.0) -> tf.Variable:
    """Add a scalar weight to the layer `host`. All replicas keep it at the same value."""
    on_read = tf.VariableSynchronization.ON_READ
    return add_scalar(host, name, value, synchronization=on_read)


class Observer:
    """Stores the range of a tensor.

    Args:
        spec: how the tensor is quantized.
        host: the layer that owns the variables.
        name: prefix of the variables' names.
    """

    counter: tf.Variable | None = None
    counters: Sequence[tf.Variable] = ()
    """The variables that count observed batches, usually only `counter`."""
    variables: Sequence[tf.Variable] = ()
    """The variables of the range, and the counters."""

    def __init__(self, spec: QuantSpec, host: keras.layers.Layer, name: str) -> None:
        self.spec, self.host = spec, host

    def range(self, x: tf.Tensor) -> Range:
        """Returns the current range. Only `CurrentValue` needs `x`."""
        raise NotImplementedError

    def update(self, x: tf.Tensor, ceiling: float | None = None, counts: Counts = True) -> Range:
        """Observes a batch and returns the new range.

        Args:
            x: the batch.
            ceiling: the maximum of the ReLU that the quantizer applies to `x`. None means no ReLU.
            counts: false if ranges are frozen, otherwise true. A `Switch` has the opposite meaning:
                it is on if ranges are frozen.
        """
        return self.range(x)


class CurrentValue(Observer):
    """The range of the current tensor, including zero. Nothing is stored."""

    def range(self, x: tf.Tensor) -> Range:
        spec, x = self.spec, tf.stop_gradient(x)
        return fake_quant.find_range(x, spec.bits, spec.symmetric, spec.narrow_range)


class LastValue(Observer):
    """The extremes of the last training batch, as `LastValueQuantize` of `tf.contrib.quantize`."""

    def __init__(self, spec: QuantSpec, host: keras.layers.Layer, name: str) -> None:
        super().__init__(spec, host, name)
        initial_min, initial_max = spec.initial_range or (0.0, 0.0)
        self.minimum = _add_variable(host, f"{name}_min", initial_min)
        self.maximum = _add_variable(host, f"{name}_max", initial_max)
        self.variables = [self.minimum, self.maximum]

    @property
    def ignores_minimum(self) -> bool:
        """True if the range always begins at zero. Only the maximum is then observed."""
        return self.spec.lower_bound == 0.0 and not self.spec.symmetric

    @property
    def is_mixed(self) -> bool:
        """True if the model computes in half precision."""
        return getattr(self.host, "mixed", False)

    def batch_range(self, x: tf.Tensor, ceiling: float | None) -> Range:
        """Returns the smallest range that includes a batch and 0, averaged over replicas."""
        spec, x = self.spec, tf.stop_gradient(x)
        if not self.ignores_minimum:
            low, high = fake_quant.find_range(x, spec.bits, spec.symmetric, spec.narrow_range)
        else:
            low, high = tf.zeros([]), tf.cast(tf.reduce_max(x), tf.float32)
            limit = math.inf if ceiling is None else ceiling
            high = tf.raw_ops.ClipByValue(t=high, clip_value_min=0.0, clip_value_max=limit)
        if self.is_mixed:  # `low` and `high` may be zero if `x` contains NaN.
            ends = [tf.reduce_max] if self.ignores_minimum else [tf.reduce_max, tf.reduce_min]
            is_known = tf.reduce_all(tf.math.is_finite(tf.stack([end(x) for end in ends])))
            low, high = (tf.where(is_known, end, np.nan) for end in (low, high))
        if spec.off_ties:
            high = widen_range(low, high)
        return mean_over_replicas(low, high)

    def extremes(self) -> tuple[float, float]:
        """Returns the range before `QuantSpec.off_ties` made it a little wider."""
        low, high = float(self.minimum.numpy()), float(self.maximum.numpy())
        return low, low + (high - low) / (1 + WIDER) if self.spec.off_ties else high

    def update(self, x: tf.Tensor, ceiling: float | None = None, counts: Counts = True) -> Range:
        low, high = self.batch_range(x, ceiling)
        seen = self.is_seen(low, high, counts)
        return (
            self.minimum.assign(select_seen(seen, low, self.minimum)),
            self.maximum.assign(select_seen(seen, high, self.maximum)),
        )

    def set(self, low: float, high: float, batches: float, wider: float = WIDER) -> None:
        """Sets the range, for example to the result of `calibrate`. It always includes zero.

        Args:
            low, high: the ends.
            batches: number of observed batches. Averages with more batches change more slowly.
            wider: share by which `QuantSpec.off_ties` widens the range.
        """
        spec = self.spec
        ends = fake_quant.find_range(
            tf.constant([low, high]), spec.bits, spec.symmetric, spec.narrow_range
        )
        self.minimum.assign(ends[0])
        self.maximum.assign(widen_range(*ends, wider) if spec.off_ties else ends[1])

    def is_seen(self, low: tf.Tensor, high: tf.Tensor, counts: Counts) -> Flag:
        """Returns true if a batch with the extremes `low` and `high` changes the range.

        In half precision, batches with infinity or NaN are ignored, because `LossScaleOptimizer`
        skips such steps.
        """
        if isinstance(counts, Switch):
            counts = tf.logical_not(counts.on)
        if not self.is_mixed:
            return counts
        return tf.logical_and(tf.math.is_finite(high - low), counts)

    def range(self, x: tf.Tensor) -> Range:
        return tf.convert_to_tensor(self.minimum), tf.convert_to_tensor(self.maximum)


class _Average(LastValue):
    """A moving average of the extremes of the batches.

    Attributes:
        decay: the decay of the average, float32.
        weigh: `compute_average_weight` or `compute_known_share`.
    """

    decay: np.float32
    weigh: staticmethod[..., tuple[tf.Tensor, tf.Tensor]]

    def count(self, counter: tf.Variable, seen: Flag, frozen: Flag | None = None) -> tf.Tensor:
        """Counts a batch if `seen` is true. Returns the second result of `weigh`."""
        prepared = step_tensors.current().averages.pop(counter.ref(), None)
        if prepared is None:  # The prepared factor is only valid for the first batch in a step.
            prepared = self.weigh(tf.convert_to_tensor(counter), self.decay, frozen)
        count, factor = prepared
        counter.assign(select_seen(seen, count, counter), read_value=False)
        return factor


def compute_average_weight(
    batches: tf.Tensor, decay: tf.Tensor, frozen: Flag | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns `batches` + 1, and the weight of the next batch in the average.

    In float32, `tf.pow` may round differently for vectors (the counts of many quantizers) than for
    scalars. Therefore the weight is computed in float64.
    """
    count = batches + 1.0
    one, decay = tf.constant(1.0, tf.float64), tf.cast(decay, tf.float64)
    number = tf.cast(count, tf.float64)
    unbiased = (one - decay) / (one - tf.pow(decay, number))
    recent = RECENT / tf.maximum(number, RECENT * RECENT)
    weight = tf.cast(tf.maximum(unbiased, recent), tf.float32)
    if frozen is None:
        return count, weight
    return tf.where(frozen, batches, count), tf.where(frozen, 0.0, weight)


class MovingAverage(_Average):
    """Exponential moving average of the batches' extremes, without bias at the start.

    The n-th batch has the weight (1 - decay) / (1 - decay^n), as in the zero-debiased average of
    `assign_moving_average`. The weight is at least 10 / max(n, 100).
    """

    weigh = staticmethod(compute_average_weight)

    def __init__(self, spec: QuantSpec, host: keras.layers.Layer, name: str) -> None:
        super().__init__(spec, host, name)
        self.counter = self.batches = _add_variable(host, f"{name}_batches")
        self.counters, self.decay = [self.batches], np.float32(spec.ema_decay)
        self.variables = [*self.variables, self.batches]

    def set(self, low: float, high: float, batches: float, wider: float = WIDER) -> None:
        super().set(low, high, batches, wider)
        self.batches.assign(batches)

    def update(self, x: tf.Tensor, ceiling: float | None = None, counts: Counts = True) -> Range:
        low, high = self.batch_range(x, ceiling)
        # If a switch freezes the range, the weight of the batch is 0.
        frozen = counts.on if isinstance(counts, Switch) else None
        seen = self.is_seen(low, high, counts if frozen is None else True)
        weight = self.count(self.batches, seen, frozen)

        def move(variable: tf.Variable, end: tf.Tensor) -> tf.Tensor:
            change = select_seen(seen, tf.convert_to_tensor(variable) - end, 0.0)
            return subtract_product(variable, weight, change)

        minimum = self.minimum if self.ignores_minimum else move(self.minimum, low)
        ends = tf.convert_to_tensor(minimum), move(self.maximum, high)
        if counts is True or frozen is not None:
            return ends
        return self._widen_empty(*ends, tf.logical_not(counts))

    def range(self, x: tf.Tensor) -> Range:
        """Returns the range. If a tensor was always 0 (a dead ReLU), the maximum is 1."""
        return self._widen_empty(*super().range(x), self.batches > 0.0)

    def _widen_empty(self, minimum: tf.Tensor, maximum: tf.Tensor, is_range: Flag) -> Range:
        """Return the range. If `is_range` is true and the range is empty, set its maximum to 1."""
        is_dead = tf.logical_and(is_range, tf.equal(minimum, maximum))
        if self.spec.symmetric:
            longer = 1.0 if self.spec.narrow_range else 2**self.spec.bits / (2**self.spec.bits - 2)
            minimum = tf.where(is_dead, -longer, minimum)
        return minimum, tf.where(is_dead, 1.0, maximum)


def compute_known_share(
    batches: tf.Tensor, decay: tf.Tensor, frozen: Flag | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns n = `batches` + 1, and 1 - decay^n, by which `ShadowedMovingAverage` divides."""
    count = batches + 1.0
    power = tf.pow(tf.cast(decay, tf.float64), tf.cast(count, tf.float64))
    known = 1.0 - tf.cast(power, tf.float32)
    return count if frozen is None else tf.where(frozen, batches, count), known


class ShadowedMovingAverage(_Average):
    """Zero-debiased moving average of the batches' extremes, as in TensorFlow 1.

    The average begins at zero. After n batches, it is divided by 1 - decay^n. The operations and
    variables are the same as in TensorFlow 1's `assign_moving_average`. Therefore `recipes.contrib`
    can continue training from TensorFlow 1 checkpoints.
    """

    weigh = staticmethod(compute_known_share)

    def __init__(self, spec: QuantSpec, host: keras.layers.Layer, name: str) -> None:
        super().__init__(spec, host, name)
        self.shadows = {
            end: tuple(
                _add_variable(host, f"{name}_{end}_{kind}") for kind in ("biased", "local_step")
            )
            for end in ("min", "max")
        }
        self.counter = self.shadows["max"][1]
        self.counters = [counter for _, counter in self.shadows.values()]
        self.decay = np.float32(1) - np.float32(1.0 - spec.ema_decay)  # Rounded as in TensorFlow 1.
        self.variables = [*self.variables, *self.shadows["min"], *self.shadows["max"]]

    def set(self, low: float, high: float, batches: float, wider: float = WIDER) -> None:
        super().set(low, high, batches, wider)
        known = 1.0 - self.spec.ema_decay**batches
        for end, variable in (("min", self.minimum), ("max", self.maximum)):
            biased, local_step = self.shadows[end]
            biased.assign(known * variable.numpy())
            local_step.assign(batches)

    def update(self, x: tf.Tensor, ceiling: float | None = None, counts: Counts = True) -> Range:
        low, high = self.batch_range(x, ceiling)
        seen = self.is_seen(low, high, counts)
        return (
            self._average(self.minimum, "min", low, seen),
            self._average(self.maximum, "max", high, seen),
        )

    def _average(self, variable: tf.Variable, end: str, value: tf.Tensor, seen: Flag) -> tf.Tensor:
        biased, counter = self.shadows[end]
        known = self.count(counter, seen)
        if end == "min" and self.ignores_minimum:
            return tf.convert_to_tensor(variable)
        # Results are bit-exact, because operations have the same order as in TensorFlow 1.
        weight = tf.constant(1.0 - self.spec.ema_decay, tf.float32)
        change = select_seen(seen, biased.read_value() - value, 0.0)
        average = subtract_product(biased, weight, change) / known
        return variable.assign(select_seen(seen, average, variable))


class Learned(LastValue):
    """A range that is trained like a weight. `calibrate` sets the initial range.

    The maximum is the absolute value of a variable. The minimum is negative or 0. The range
    therefore always includes zero.
    """

    def __init__(self, spec: QuantSpec, host: keras.layers.Layer, name: str) -> None:
        Observer.__init__(self, spec, host, name)
        own: dict[str, Any] = {"shape": (), "dtype": "float32", "initializer": "zeros"}
        has_minimum = not (self.ignores_minimum or spec.symmetric)
        self.minimum = host.add_weight(name=f"{name}_min", trainable=has_minimum, **own)
        self.maximum = host.add_weight(name=f"{name}_max", trainable=True, **own)
        self.variables = [self.minimum, self.maximum]

    def range(self, x: tf.Tensor) -> Range:
        spec, high = self.spec, tf.abs(self.maximum.read_value())
        if spec.symmetric:
            return -high * (1.0 if spec.narrow_range else 2**spec.bits / (2**spec.bits - 2)), high
        return -tf.abs(self.minimum.read_value()), high

    def set(self, low: float, high: float, batches: float, wider: float = WIDER) -> None:
        if low == high == 0:  # An empty range would mean "no data".
            high = 1.0
        super().set(low, high, batches, wider)

    def update(self, x: tf.Tensor, ceiling: float | None = None, counts: Counts = True) -> Range:
        """Returns the current range. A batch changes the range only through the gradient."""
        return self.range(x)


def make_observer(spec: QuantSpec, host: keras.layers.Layer, name: str) -> Observer:
    return OBSERVERS[spec.observer](spec, host, name)


OBSERVERS: dict[str, type[Observer]] = {
    "moving_average": MovingAverage,
    "shadowed_moving_average": ShadowedMovingAverage,
    "last_value": LastValue,
    "current_value": CurrentValue,
    "learned": Learned,
    "learned_clipping": Learned,
}
"""Classes of observers, by the value of `QuantSpec.observer`."""
