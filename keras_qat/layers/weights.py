"""Weight quantizers: the part of a wrapper that fake-quantizes one weight."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat import fake_quant, observers
from keras_qat.branching import cond, straight_through
from keras_qat.layers.scheduled import Phase
from keras_qat.specs import QuantSpec

__all__ = ["WeightQuantizer"]


class WeightQuantizer:
    """Fake-quantizes one weight of a layer, per tensor or per output channel.

    Args:
        spec: how. Per channel is symmetric with a narrow range and takes the current values; so
            may one range for all be, which then is the same with a single channel.
        host: the layer that owns the variables; called while that layer is built.
        name: the weight's attribute name, prefix of the variables' names.
        channel_axes: axes of the output channels, counted from the end.
    """

    def __init__(
        self, spec: QuantSpec, host: Any, name: str, channel_axes: tuple[int, ...]
    ) -> None:
        self.spec = spec
        self.channel_axes = channel_axes if spec.per_channel else ()
        is_current = spec.observer == "current_value" and spec.symmetric and spec.narrow_range
        is_stored = not (spec.per_channel or is_current)
        self.observer = observers.make(spec, host, name) if is_stored else None

    def __call__(self, weights: Any, phase: Phase) -> Any:
        """Fake-quantizes `weights`, which are observed if this is training."""
        spec, observer = self.spec, self.observer
        weights = tf.convert_to_tensor(weights)
        quantizing = phase.quantizing if spec.delayed else True
        if observer is not None:
            minimum, maximum = cond(
                phase.training, lambda: observer.update(weights), lambda: observer.range(weights)
            )
            return fake_quant.fake_quantize_if(
                quantizing, weights, minimum, maximum, spec.bits, spec.narrow_range
            )

        def quantized(weights: Any) -> Any:
            limits = fake_quant.channel_limits(weights, self.channel_axes)
            return fake_quant.fake_quantize_channels(weights, limits, spec.bits)

        return straight_through(
            lambda weights: cond(
                quantizing, lambda: quantized(weights), lambda: tf.identity(weights)
            ),
            weights,
        )

    def current_range(self, weights: Any) -> tuple[Any, Any]:
        """The range as numpy values: scalars, or one for each channel."""
        if self.observer is not None:
            minimum, maximum = self.observer.range(weights)
            return minimum.numpy(), maximum.numpy()
        limits = tf.reshape(fake_quant.channel_limits(weights, self.channel_axes), [-1]).numpy()
        return -limits, limits
