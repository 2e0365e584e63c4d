"""Custom layers that compute their kernel from weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.helpers import keras, layers


class StandardizedDense(layers.Layer):
    """Reads its weights several times to compute the kernel."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (input_shape[-1], 5))

    def call(self, inputs):
        mean, variance = tf.nn.moments(self.kernel, 0)
        return tf.matmul(inputs, (self.kernel - mean) / tf.sqrt(variance + 1e-6))


class WeightNormalized(layers.Layer):
    """A direction and a length for each filter."""

    def build(self, input_shape):
        shape = (3, 3, input_shape[-1], 5)
        self.length = self.add_weight("g", shape[-1:], initializer="ones")
        self.direction = self.add_weight("v", shape, regularizer=keras.regularizers.l2(0.01))
        self.bias = self.add_weight("b", shape[-1:])
        super().build(input_shape)

    def call(self, inputs):
        norms = tf.sqrt(tf.reduce_sum(tf.square(self.direction), [0, 1, 2]))
        kernel = self.length * self.direction / norms
        return tf.nn.conv2d(inputs, kernel, 1, "SAME") + self.bias


class WeightStandardized(layers.Conv2D):
    """A subclass that standardizes its kernel."""

    def call(self, inputs):
        mean, variance = tf.nn.moments(self.kernel, [0, 1, 2], keepdims=True)
        kernel = (self.kernel - mean) * tf.math.rsqrt(variance + 1e-5)
        return tf.nn.bias_add(self.convolution_op(inputs, kernel), self.bias)


class MaskedSteps(layers.Layer):
    """A kernel with a fixed mask that excludes later steps."""

    def build(self, input_shape):
        mask = keras.initializers.Constant(np.array([1, 1, 0], np.float32).reshape(3, 1, 1))
        self.mask = self.add_weight("mask", (3, 1, 1), initializer=mask, trainable=False)
        self.kernel = self.add_weight("kernel", (3, input_shape[-1], 5))

    def call(self, inputs):
        return tf.nn.conv1d(inputs, self.mask * self.kernel, 1, "SAME")


class NormalizedDepthwise(layers.Layer):
    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (3, 3, input_shape[-1], 2))

    def call(self, inputs):
        kernel = tf.nn.l2_normalize(self.kernel, [0, 1])
        return tf.nn.depthwise_conv2d(inputs, kernel, [1, 1, 1, 1], "VALID")


class NormalizedTransposed(layers.Layer):
    """Convolves images, then their rows, to the sizes of Keras' layers."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (3, 3, 5, input_shape[-1]))
        self.steps = self.add_weight("steps", (4, 3, 5))

    def call(self, inputs):
        count, height, width = tf.unstack(tf.shape(inputs)[:3])
        kernel, steps = (tf.nn.l2_normalize(w, [0, 1]) for w in (self.kernel, self.steps))
        shape = [count, 2 * height, 2 * width, 5]
        x = tf.nn.conv2d_transpose(inputs, kernel, shape, 2, "SAME")[:, 1]
        return tf.nn.conv1d_transpose(x, steps, [count, 4 * width, 3], 2, "SAME")


class NormalizedWithGaps(layers.Layer):
    """Convolves sequences with the function for any number of axes."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (3, input_shape[-1], 5))

    def call(self, inputs):
        kernel = tf.nn.l2_normalize(self.kernel, [0, 1])
        return tf.nn.convolution(inputs, kernel, padding="SAME", dilations=[2])


class Oscillating(layers.Layer):
    """A depthwise kernel of decaying oscillations, as in state space models."""

    def build(self, input_shape):
        shape = (input_shape[-1],)
        self.rate = self.add_weight("rate", shape, initializer="ones")
        self.pitch = self.add_weight("pitch", shape, initializer="ones")

    def call(self, inputs):
        rates = tf.complex(-tf.exp(self.rate), self.pitch)
        steps = rates[:, None] * tf.cast(tf.range(3), tf.complex64)
        kernel = tf.transpose(tf.math.real(tf.exp(steps) - 0.5j))[:, None, :, None]
        return tf.nn.depthwise_conv2d(inputs, kernel, [1, 1, 1, 1], "VALID")


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "standardized weights": lambda x: StandardizedDense()(layers.Conv2D(4, 3)(x)),
    "normalized weights": lambda x: tf.nn.relu(WeightNormalized()(x)),
    "a standardized kernel": lambda x: layers.BatchNormalization()(WeightStandardized(5, 3)(x)),
    "a masked kernel": lambda x: MaskedSteps()(layers.Reshape((64, 4))(x)),
    "a normalized depthwise kernel": lambda x: NormalizedDepthwise()(x),
    "a kernel of complex numbers": lambda x: Oscillating()(x),
    "normalized transposed kernels": lambda x: NormalizedTransposed()(x),
    "a normalized kernel with gaps": lambda x: NormalizedWithGaps()(layers.Reshape((64, 4))(x)),
}
"""Name -> a function of a tensor of 8 x 8 x 4. All are computed in integers."""
