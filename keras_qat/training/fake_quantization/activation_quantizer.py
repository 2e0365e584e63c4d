"""Quantizers of activations, which observe a range and fake-quantize to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.control_flow import Switch, cond, straight_through
from keras_qat.config import specs
from keras_qat.keras2.backend import keras
from keras_qat.training.fake_quantization.learned import fake_quantize_learned
from keras_qat.training.fake_quantization.observers import Counts, Observer, Range, make_observer
from keras_qat.training.fake_quantization.phase import Flag, Phase
from keras_qat.training.steps.recompute import find_source


class ActivationQuantizer:
    """Observes the range of an activation tensor, and fake-quantizes to this range.

    Args:
        spec: `QuantSpec` or `FixedSpec`.
        host: the layer that owns the variables. The quantizer is created while `host` is built.
        name: prefix of the variables' names.
        slots: number of tensors that share the range, such as the inputs of a concatenation. The
            tensors are observed separately. The range includes the values of all tensors.
    """

    def __init__(
        self,
        spec: specs.QuantSpec | specs.FixedSpec,
        host: keras.layers.Layer,
        name: str,
        slots: int = 1,
    ) -> None:
        self.spec = spec
        self.watched: Callable[[int, tf.Tensor], None] | None = None
        """`calibrate` sets this function. It is called with the slot and the tensor."""
        self.observers: list[Observer] = []
        if isinstance(spec, specs.QuantSpec):
            names = [name] if slots == 1 else [f"{name}_{slot}" for slot in range(slots)]
            self.observers = [make_observer(spec, host, prefix) for prefix in names]

    def __call__(
        self, x: tf.Tensor, phase: Phase, slot: int | None = 0, ceiling: float | None = None
    ) -> tf.Tensor:
        """Fake-quantizes `x`. In training, `x` first updates the range.

        Args:
            x, phase: the tensor, and the phase of the call.
            slot: number of `x` among the tensors that share the range. None if `x` is an average of
                quantized values, as in AveragePooling2D, which does not change the range.
            ceiling: if given, a ReLU with this maximum is applied to `x` first.
        """
        if phase.training is False and phase.quantizing is False:
            y = fake_quant.apply_relu(x, ceiling)
            if self.watched is not None and slot is not None:
                self.watched(slot, y)
            return y
        low, high = self._constant_range(phase) or self._observe_in_phase(x, phase, slot, ceiling)
        applies, bits = self.applies(phase, low, high), self.spec.bits
        if slot is None:
            average = partial(
                fake_quant.fake_quantize_average, minimum=low, maximum=high, bits=bits
            )
            return straight_through(
                lambda x: cond(applies, lambda: average(x), lambda: tf.identity(x)), x
            )
        if self.learns:
            rounding = getattr(self.spec, "observer", "") == "learned"
            y = fake_quantize_learned(
                applies, x, low, high, bits, rounding=rounding, fixed=phase.fixed
            )
        else:
            is_known = phase.training is True and isinstance(applies, bool) and ceiling is None
            source = find_source(x) if is_known else None
            y = fake_quant.fake_quantize_if(applies, x, low, high, bits, False, ceiling, source)
        if self.watched is not None:
            self.watched(slot, y)
        return y

    def _constant_range(self, phase: Phase) -> tuple[float, float] | None:
        """Return the range if the graph may contain it as a constant. Otherwise return None."""
        if isinstance(self.spec, specs.FixedSpec):
            return float(self.spec.minimum), float(self.spec.maximum)
        if not phase.known or self.learns:
            return None
        minimum, maximum = self.current_range()
        return (minimum, maximum) if minimum < maximum else None

    def observe_only(self, x: tf.Tensor, phase: Phase) -> None:
        self._observe_in_phase(x, phase, 0, None)
        if self.watched is not None:
            self.watched(0, x)

    def _observe_in_phase(
        self, x: tf.Tensor, phase: Phase, slot: int | None, ceiling: float | None
    ) -> Range:
        training = False if phase.fixed is True else phase.training
        counts = phase.fixed
        if not isinstance(counts, Switch):
            counts = True if counts is False else tf.logical_not(counts)
        return self.observe(x, training, slot, ceiling, counts)

    @property
    def learns(self) -> bool:
        learned = ("learned", "learned_clipping")
        return isinstance(self.spec, specs.QuantSpec) and self.spec.observer in learned

    @property
    def clips_at_zero(self) -> bool:
        """True if the range always begins at zero, so quantization clips values like a ReLU."""
        spec = self.spec
        if not isinstance(spec, specs.QuantSpec) or spec.observer == "current_value":
            return False
        starts_at_zero = spec.initial_range is None or spec.initial_range[0] == 0.0
        is_positive = spec.lower_bound == 0.0 and not spec.symmetric
        return not self.learns and is_positive and starts_at_zero

    def observe(
        self,
        x: tf.Tensor | None,
        training: Flag,
        slot: int | None = 0,
        ceiling: float | None = None,
        counts: Counts = True,
    ) -> Range:
        """Returns the range. In training, `x` first updates the range, unless it is frozen."""
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

    def applies(self, phase: Phase, minimum: tf.Tensor, maximum: tf.Tensor) -> Flag | Switch:
        if phase.calibrated:
            return phase.quantizing
        has_range = self.has_range(minimum, maximum)
        if isinstance(phase.quantizing, Switch):
            return Switch(tf.logical_and(phase.quantizing.on, has_range))
        return tf.logical_and(phase.quantizing, has_range)

    def has_range(self, minimum: tf.Tensor, maximum: tf.Tensor) -> Flag:
        """Returns true if the range is fixed or initial, or if data have been observed."""
        if isinstance(self.spec, specs.FixedSpec) or self.spec.initial_range is not None:
            return True
        return maximum > minimum

    @property
    def untouched_range(self) -> tuple[float, float] | None:
        """The recipe's initial range if no data has been observed yet. Otherwise None."""
        if not isinstance(self.spec, specs.QuantSpec) or self.spec.initial_range is None:
            return None
        counters = [observer.counter for observer in self.observers]
        is_untouched = all(counter is not None and counter.numpy() == 0 for counter in counters)
        return self.spec.initial_range if is_untouched else None

    def is_calibrated(self) -> Flag:
        return self.has_range(*self.observe(None, training=False))

    def current_range(self) -> tuple[float, float]:
        """Returns the range as floats. It is (0, 0) if no data have been observed."""
        with tf.init_scope():  # Reads values even while a function is traced.
            minimum, maximum = self.observe(None, training=False)
            return float(minimum), float(maximum)
