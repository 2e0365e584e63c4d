"""Custom layers that cannot be traced, each with its reason."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.helpers import layers


class ByValue(layers.Layer):
    def call(self, inputs):
        if tf.reduce_max(inputs) > 1:
            return inputs * 2.0
        return inputs


class InNumpy(layers.Layer):
    def call(self, inputs):
        return tf.ensure_shape(tf.numpy_function(np.abs, [inputs], tf.float32), inputs.shape)


class Random(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.uniform((4,))


class Counting(layers.Layer):
    calls = 0

    def call(self, inputs):
        self.calls += 1
        return inputs * float(self.calls)


class OwnNorm(layers.Layer):
    def call(self, inputs):
        mean = tf.reduce_mean(inputs, axis=-1, keepdims=True)
        spread = tf.reduce_mean((inputs - mean) ** 2, axis=-1, keepdims=True)
        return (inputs - mean) * tf.math.rsqrt(spread + 1e-3)


class WithLoss(layers.Layer):
    def call(self, inputs):
        self.add_loss(lambda: tf.constant(1.0))
        return inputs * 2.0


class NoisyInTraining(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4)

    def call(self, inputs, training=None):
        return self.dense(inputs) * 2.0 if training else self.dense(inputs) * 3.0


CLOSED: dict[str, tuple[Callable[[], Any], str]] = {
    "by value": (ByValue, r"in `if tf.reduce_max\(inputs\) > 1:`"),
    "numpy": (InNumpy, "InvalidArgument|numpy|KerasTensor|Error"),
    "random": (Random, "differ from call to call"),
    "counting": (Counting, "differ from call to call"),
    "normalization": (OwnNorm, r"it normalizes \(tf.math.rsqrt\)"),
    "a loss": (WithLoss, "it calls add_loss|adds to the loss"),
    "training": (NoisyInTraining, "computes differently in training"),
}
"""Name -> a layer that cannot be traced, and its reason."""
