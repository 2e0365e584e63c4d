"""Quantizers of activations, which observe their range and fake-quantize to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.control_flow import Switch, cond, straight_through
from keras_qat.config import specs
from keras_qat.keras2.backend import keras
from keras_qat.training.fake_quantization import observers
from keras_qat.training.fake_quantization.learned import fake_quantize_learned
from keras_qat.training.fake_quantization.phase import Flag, Phase
from keras_qat.training.steps import step_tensors
from keras_qat.training.steps.recompute import source_of


class ActivationQuantizer:
    """Observes and fake-quantizes activations, per tensor.

    Args:
        spec: `QuantSpec` or `FixedSpec`.
        host: the layer that owns the variables; the quantizer is made while `host` is built.
        name: prefix of the variables' names.
        slots: how many tensors share the range, such as the inputs of a concatenation. They are
            observed separately, and the range holds them all.
    """

    def __init__(
        self,
        spec: specs.QuantSpec | specs.FixedSpec,
        host: keras.layers.Layer,
        name: str,
        slots: int = 1,
    ) -> None:
        self.spec = spec
        self.watched: Callable[[int, Any], None] | None = None
        """Function that is called with the slot and the values of each tensor, for `calibrate`."""
        self.observers: list[observers.LastValue | observers.CurrentValue] = []
        if isinstance(spec, specs.QuantSpec):
            names = [name] if slots == 1 else [f"{name}_{slot}" for slot in range(slots)]
            self.observers = [observers.make(spec, host, prefix) for prefix in names]

    def __call__(
        self, x: tf.Tensor, phase: Phase, slot: int | None = 0, ceiling: float | None = None
    ) -> Any:
        """Fake-quantizes `x`, and observes it in `slot` if this is training.

        Without a slot, `x` is an average of values that this quantizer was applied to. With a
        `ceiling`, a ReLU of `x` with that maximum is quantized.
        """
        if phase.training is False and phase.quantizing is False:
            y = fake_quant.apply_relu(x, ceiling)
            if self.watched is not None and slot is not None:
                self.watched(slot, y)
            return y
        minimum, maximum = self._numbers(phase) or self._observed(x, phase, slot, ceiling)
        applies = self.applies(phase, minimum, maximum)
        if slot is None:
            average = partial(
                fake_quant.fake_quantize_average,
                minimum=minimum,
                maximum=maximum,
                bits=self.spec.bits,
            )
            return straight_through(
                lambda x: cond(applies, lambda: average(x), lambda: tf.identity(x)), x
            )
        if self.learns:
            y = fake_quantize_learned(
                applies,
                x,
                minimum,
                maximum,
                self.spec.bits,
                rounding=getattr(self.spec, "observer", "") == "learned",
                fixed=phase.fixed,
            )
        else:
            is_known = phase.training is True and isinstance(applies, bool) and ceiling is None
            source = source_of(x) if is_known else None
            y = fake_quant.fake_quantize_if(
                applies,
                x,
                minimum,
                maximum,
                self.spec.bits,
                False,
                ceiling,
                source,
                step_tensors.current().gates,
            )
        if self.watched is not None:
            self.watched(slot, y)
        return y

    def _numbers(self, phase: Phase) -> tuple[float, float] | None:
        """Returns the range as numbers if it is constant in the graph, else None."""
        if isinstance(self.spec, specs.FixedSpec):
            return float(self.spec.minimum), float(self.spec.maximum)
        if not phase.known or self.learns:
            return None
        minimum, maximum = self.current_range()
        return (minimum, maximum) if minimum < maximum else None

    def take_in(self, x: tf.Tensor, phase: Phase) -> None:
        """Observes `x` if this is training, without quantizing it."""
        self._observed(x, phase, 0, None)
        if self.watched is not None:
            self.watched(0, x)

    def _observed(self, x: tf.Tensor, phase: Phase, slot: int | None, ceiling: float | None) -> Any:
        training = False if phase.fixed is True else phase.training
        counts = phase.fixed
        if not isinstance(counts, Switch):
            counts = True if counts is False else tf.logical_not(counts)
        return self.observe(x, training, slot, ceiling, counts)

    @property
    def learns(self) -> bool:
        """Whether training learns its range."""
        learned = ("learned", "learned_clipping")
        return isinstance(self.spec, specs.QuantSpec) and self.spec.observer in learned

    @property
    def clips_at_zero(self) -> bool:
        """Whether the range always begins at zero, so that the quantizer also computes a ReLU."""
        spec = self.spec
        if not isinstance(spec, specs.QuantSpec) or spec.observer == "current_value":
            return False
        if self.learns:
            return False
        starts_at_zero = spec.initial_range is None or spec.initial_range[0] == 0.0
        return spec.lower_bound == 0.0 and not spec.symmetric and starts_at_zero

    def observe(
        self,
        x: tf.Tensor,
        training: Flag | None,
        slot: int | None = 0,
        ceiling: float | None = None,
        counts: Flag | Switch = True,
    ) -> tuple[Any, Any]:
        """Returns the range, after observing `x` if `training` and (without a branch) `counts`."""
        if isinstance(self.spec, specs.FixedSpec):
            return tf.constant(self.spec.minimum), tf.constant(self.spec.maximum)
        ranges = [
            cond(training, partial(observer.update, x, ceiling, counts), partial(observer.range, x))
            if index == slot
            else observer.range(x)
            for index, observer in enumerate(self.observers)
        ]
        low, high = ranges[0]
        if len(ranges) > 1:
            minima, maxima = zip(*ranges, strict=True)
            low, high = tf.reduce_min(tf.stack(minima)), tf.reduce_max(tf.stack(maxima))
        if getattr(self.spec, "power_of_two", False):
            return fake_quant.power_of_two_range(low, high, self.spec.bits)
        return low, high

    def applies(self, phase: Phase, minimum: tf.Tensor, maximum: tf.Tensor) -> Any:
        """Whether a call quantizes: not before the delay, and not before any data was observed."""
        if phase.calibrated:
            return phase.quantizing
        has_range = self.has_range(minimum, maximum)
        if isinstance(phase.quantizing, Switch):
            return Switch(tf.logical_and(phase.quantizing.on, has_range))
        return tf.logical_and(phase.quantizing, has_range)

    def has_range(self, minimum: tf.Tensor, maximum: tf.Tensor) -> Any:
        """Whether the ends are a usable range, and not those of a quantizer without data."""
        if isinstance(self.spec, specs.FixedSpec) or self.spec.initial_range is not None:
            return True
        return maximum > minimum

    @property
    def untouched_range(self) -> tuple[float, float] | None:
        """The recipe's initial range, as long as no data has changed it; else None."""
        if not isinstance(self.spec, specs.QuantSpec) or self.spec.initial_range is None:
            return None
        counters = [observer.counter for observer in self.observers]
        is_untouched = all(counter is not None and counter.numpy() == 0 for counter in counters)
        return self.spec.initial_range if is_untouched else None

    def is_calibrated(self) -> Any:
        """Whether it has a range."""
        return self.has_range(*self.observe(None, training=False))

    def current_range(self) -> tuple[float, float]:
        """Returns the range as numbers: (0, 0) before any data."""
        with tf.init_scope():  # Gives numbers even while a function is being traced.
            minimum, maximum = self.observe(None, training=False)
            return float(minimum), float(maximum)
