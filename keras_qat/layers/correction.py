"""BatchNormalization folding with correction factors, as `tf.contrib.quantize` trained it.

The kernel is folded with the moving variance, so that its range is smooth, and the result is
corrected to what the batch's statistics would have given, until BatchNormalization is frozen.
The batch's statistics come from a second convolution, with the float kernel.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat import backend
from keras_qat.layers.scheduled import Phase

__all__ = ["CorrectedFold"]


def moments(z: Any, axes: list[int]) -> tuple[Any, Any]:
    """`tf.nn.moments`, with its gradient written out: a fifth of the passes over `z`."""

    @tf.custom_gradient
    def of(z: Any) -> Any:
        mean, variance = tf.nn.moments(z, axes, keepdims=True)

        def gradient(d_mean: Any, d_variance: Any) -> Any:
            count = tf.cast(tf.size(z) / tf.size(mean), z.dtype)
            slope = d_variance * (2.0 / count)
            return z * slope + (d_mean / count - mean * slope)

        return (mean, variance), gradient

    mean, variance = of(z)
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


class CorrectedFold:
    """One call of a layer with BatchNormalization: `training` or `inference`.

    `inference` is also what training computes once the statistics are frozen: there the
    original's correction cancels out, and one convolution is enough.

    The order of operations is the original's, and values of the moving statistics are those from
    before the step: results agree with recorded runs to float rounding.
    """

    def __init__(self, wrapper: Any, inputs: Any, phase: Phase) -> None:
        self.layer, self.norm, self.inputs, self.phase = (
            wrapper.layer,
            wrapper.batch_norm,
            inputs,
            phase,
        )
        ((self.weight, self.channel_axes),) = wrapper.weight_axes.items()
        self.quantizer = wrapper.weight_quantizers.get(self.weight)
        self.kernel = tf.convert_to_tensor(getattr(self.layer, self.weight))
        self.mean = self.norm.moving_mean.read_value()
        self.variance = self.norm.moving_variance.read_value()
        self.gamma = self.norm.gamma if self.norm.scale else tf.ones_like(self.mean)
        self.beta = self.norm.beta if self.norm.center else tf.zeros_like(self.mean)

    def training(self) -> Any:
        """The result with the batch's statistics; updates the moving ones."""
        z = self.convolve(self.kernel)
        axes = [axis for axis in range(len(z.shape)) if axis != self.norm.axis[0]]
        mean, variance = moments(z, axes)
        inverse, moving_inverse = self.inverse(variance), self.inverse(self.variance)
        correction = moving_inverse / inverse
        folded = self.scale(self.scale(self.kernel, correction), self.gamma * inverse)
        y = self.convolve(self.quantize(folded))

        self.update(mean, variance, tf.size(z) / tf.size(mean))
        return y * self.spread(1.0 / correction, y) + self.spread(
            self.beta - mean * self.gamma * inverse, y
        )

    def inference(self) -> Any:
        """The result with the moving statistics, uncorrected: what is exported."""
        factor = self.gamma * self.inverse(self.variance)
        y = self.convolve(self.quantize(self.scale(self.kernel, factor)))
        return y + self.spread(self.beta - self.mean * factor, y)

    def update(self, mean: Any, variance: Any, count: Any) -> None:
        """Moves the moving statistics towards the batch's."""
        count = tf.cast(count, mean.dtype)
        weight = tf.constant(1.0 - self.norm.momentum)
        # Bessel's correction makes it the estimate of the population's variance.
        variance = variance * (count / tf.maximum(count - 1, 1))
        for variable, moving, batch in (
            (self.norm.moving_mean, self.mean, mean),
            (self.norm.moving_variance, self.variance, variance),
        ):
            variable.assign_sub((moving - tf.stop_gradient(batch)) * weight)

    def inverse(self, variance: Any) -> Any:
        """One over the standard deviation."""
        return tf.math.rsqrt(variance + self.norm.epsilon)

    def scale(self, kernel: Any, factor: Any) -> Any:
        """The kernel with each output channel multiplied by its factor."""
        axes, rank = self.channel_axes, kernel.shape.rank
        shape = [kernel.shape[axis] if axis in axes else 1 for axis in range(-rank, 0)]
        return kernel * tf.reshape(factor, shape)

    def spread(self, values: Any, y: Any) -> Any:
        """Values per channel, shaped to broadcast against the layer's output."""
        channel_axis = self.norm.axis[0]
        return tf.reshape(
            values, [-1 if axis == channel_axis else 1 for axis in range(len(y.shape))]
        )

    def convolve(self, kernel: Any) -> Any:
        """The layer with another kernel."""
        with backend.swapped(self.layer, **{self.weight: kernel}):
            return self.layer(self.inputs)

    def quantize(self, folded: Any) -> Any:
        """The folded kernel, quantized if the plan says so."""
        return folded if self.quantizer is None else self.quantizer(folded, self.phase)
