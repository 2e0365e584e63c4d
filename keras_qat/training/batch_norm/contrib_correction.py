"""BatchNormalization folding with correction factors, as in `tf.contrib.quantize`.

The kernel is multiplied by `gamma / sqrt(moving variance)` and quantized, because exported files
contain this kernel. While BatchNormalization learns, training must normalize with the batch's
statistics. A second convolution with the float kernel computes these statistics.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.control_flow import cond
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.training.batch_norm.factor_and_bias import Weighted, scale_channels
from keras_qat.training.distribution import combine_moments
from keras_qat.training.fake_quantization.observers import subtract_product
from keras_qat.training.fake_quantization.phase import Phase

MUCH_LESS = 0.8
"""`is_covariance_faster` requires a cost below this share of the convolution's cost."""


def moments(z: tf.Tensor, channel_axis: int) -> tuple[Any, Any]:
    """Returns the mean and variance of each channel. The gradient is faster than TensorFlow's."""
    axes = [axis for axis in range(len(z.shape)) if axis != channel_axis]

    @tf.custom_gradient
    def of(z: tf.Tensor) -> Any:
        none, channels = tf.zeros(0), z.shape[channel_axis]
        count = tf.cast(tf.size(z) / channels, z.dtype)
        if len(z.shape) == 4 and channel_axis == 3 and z.dtype == tf.float32:
            _, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
                x=z, scale=tf.ones(channels), offset=tf.zeros(channels), mean=none, variance=none
            )
            variance *= (count - 1) / count  # Reverts Bessel's correction.
        else:
            mean, variance = tf.nn.moments(z, axes)

        def gradient(d_mean: tf.Tensor, d_variance: tf.Tensor) -> Any:
            slope = d_variance * (2.0 / count)
            offset = d_mean / count - mean * slope  # Two passes are faster than one fused pass.
            return z * spread(slope, z, channel_axis) + spread(offset, z, channel_axis)

        return (mean, variance), gradient

    return of(z)


def mean_and_covariance(rows: tf.Tensor) -> tuple[Any, Any]:
    """Returns the mean and covariance of a matrix' columns, with a gradient that saves memory."""

    @tf.custom_gradient
    def of(rows: tf.Tensor) -> Any:
        count = tf.cast(tf.shape(rows)[0], rows.dtype)
        mean = tf.reduce_mean(rows, 0)
        centered = rows - mean
        covariance = tf.matmul(centered, centered, transpose_a=True) / count

        def gradient(d_mean: tf.Tensor, d_covariance: tf.Tensor) -> Any:
            slope = (d_covariance + tf.transpose(d_covariance)) / count
            # Without `centered`, which need not stay in memory.
            offset = d_mean / count - tf.linalg.matvec(slope, mean)
            return tf.nn.bias_add(tf.matmul(rows, slope), offset)

        return (mean, covariance), gradient

    return of(rows)


def is_covariance_faster(layer: keras.layers.Layer, inputs: tf.Tensor) -> bool:
    """Returns True if the output's mean and variance are faster to compute without the convolution.

    For a 1x1 convolution, they follow from the mean and covariance of `inputs`. The cost is the
    number of multiplications, including those for gradients. Unknown sizes count as 32.
    """
    is_by_pixel = (
        type(layer) is backend.keras.layers.Conv2D
        and layer.kernel_size == (1, 1)
        and layer.groups == 1
        and layer.data_format == "channels_last"
    )
    if not is_by_pixel:
        return False
    (channels, filters), (batch, *sizes) = layer.kernel.shape[-2:], inputs.shape[:3]
    pixels = batch or 32
    for size, stride in zip(sizes, layer.strides, strict=True):
        pixels *= math.ceil((size or 32) / stride)
    of_covariance = channels * channels * (2 + 3 * filters / pixels)
    return of_covariance < MUCH_LESS * 3 * channels * filters


def spread(values: tf.Tensor, y: tf.Tensor, channel_axis: int) -> Any:
    """Reshapes a vector with one value per channel. The result can be added to `y`."""
    return tf.reshape(values, [-1 if axis == channel_axis else 1 for axis in range(len(y.shape))])


class CorrectedFold:
    """Computes a call of a layer and the BatchNormalization after it.

    The results equal those of `tf.contrib.quantize`, except for rounding. Here, the correction
    factor multiplies the quantized kernel, not the output. If the statistics are frozen, only one
    convolution is needed. Moving statistics are read before the step updates them.
    """

    def __init__(self, wrapper: Weighted, inputs: tf.Tensor, phase: Phase) -> None:
        self.layer, self.norm = wrapper.layer, wrapper.batch_norm
        self.inputs, self.phase = inputs, phase
        ((self.weight, self.channel_axes),) = wrapper.weight_axes.items()
        self.quantizer = wrapper.weight_quantizers.get(self.weight)
        self.kernel = tf.convert_to_tensor(getattr(self.layer, self.weight))
        self.mean = self.norm.moving_mean.read_value()
        self.variance = self.norm.moving_variance.read_value()
        self.gamma = self.norm.gamma if self.norm.scale else tf.ones_like(self.mean)
        self.beta = self.norm.beta if self.norm.center else tf.zeros_like(self.mean)
        self.synchronized = getattr(self.norm, "synchronized", False)
        self.moving_inverse = self.inverse(self.variance)
        self.moments: Any = None

    def __call__(self, learning: Any) -> Any:
        """Computes the output. `learning` is a bool, or a tensor that `cond` reads.

        If it is True, the output is corrected to the batch's statistics. Replicas exchange
        statistics before the `cond`, because they must not wait for each other inside a branch.
        """
        axis, factor = self.norm.axis[0], self.gamma * self.moving_inverse
        kernel = self.quantize(scale_channels(self.kernel, self.channel_axes, factor))
        if learning is False:
            y = self.convolve(kernel)
            return y + spread(self.beta - self.mean * factor, y, axis)
        if self.synchronized:
            self.moments = self.batch_moments()
        factor, offset = cond(learning, self.find_correction, self.find_moving)
        y = self.convolve(scale_channels(kernel, self.channel_axes, factor))
        return y + spread(offset, y, axis)

    def find_correction(self) -> tuple[Any, Any]:
        """Returns a factor and an offset to normalize the batch. Also updates moving statistics."""
        mean, variance, count = self.moments or self.batch_moments()
        inverse = self.inverse(variance)
        self.update(mean, variance, count)
        return inverse / self.moving_inverse, self.beta - mean * self.gamma * inverse

    def find_moving(self) -> tuple[Any, Any]:
        """Returns a factor and an offset to normalize with the moving statistics."""
        offset = self.beta - self.mean * (self.gamma * self.moving_inverse)
        return tf.ones_like(offset), offset

    def batch_moments(self) -> tuple[Any, Any, Any]:
        """Returns statistics of each channel: the mean, the variance, and the number of values.

        A `synchronized` BatchNormalization includes the outputs on all replicas.
        """
        mean, variance, size = self.local_moments()
        count = tf.cast(size, mean.dtype)
        return (
            combine_moments(mean, variance, count) if self.synchronized else (mean, variance, count)
        )

    def local_moments(self) -> tuple[Any, Any, Any]:
        """Returns the same as `batch_moments`, for the outputs on this replica."""
        if not is_covariance_faster(self.layer, self.inputs):
            z = self.convolve(self.kernel)
            mean, variance = moments(z, self.norm.axis[0])
            return mean, variance, tf.size(z) / tf.size(mean)
        rows, columns = self.layer.strides
        pixels = self.inputs if rows == columns == 1 else self.inputs[:, ::rows, ::columns]
        pixels = tf.reshape(pixels, [-1, self.inputs.shape[-1]])
        pixel_mean, covariance = mean_and_covariance(tf.cast(pixels, tf.float32))
        matrix = tf.reshape(self.kernel, self.kernel.shape[-2:])
        mean = tf.linalg.matvec(matrix, pixel_mean, transpose_a=True)
        variance = tf.reduce_sum(matrix * (covariance @ matrix), 0)
        return mean, variance, tf.shape(pixels)[0]

    def update(self, mean: tf.Tensor, variance: tf.Tensor, count: Any) -> None:
        weight = tf.constant(1.0 - self.norm.momentum)
        # Bessel's correction, for an unbiased estimate of the variance.
        variance = variance * (count / tf.maximum(count - 1, 1))
        for variable, moving, batch in (
            (self.norm.moving_mean, self.mean, mean),
            (self.norm.moving_variance, self.variance, variance),
        ):
            subtract_product(variable, weight, moving - tf.stop_gradient(batch))

    def inverse(self, variance: tf.Tensor) -> Any:
        return tf.math.rsqrt(variance + self.norm.epsilon)

    def convolve(self, kernel: tf.Tensor) -> Any:
        """Calls the layer with another kernel. The result is float32."""
        kernel = tf.cast(kernel, self.layer.compute_dtype)
        with backend.swap_attributes(self.layer, **{self.weight: kernel}):
            return tf.cast(self.layer(self.inputs), tf.float32)

    def quantize(self, folded: tf.Tensor) -> Any:
        return folded if self.quantizer is None else self.quantizer(folded, self.phase)
