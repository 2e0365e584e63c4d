"""Oscillations: low-bit weights that jump between two levels, and how they are frozen."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.training.layers.weight_quantizer import WeightQuantizer


class Oscillations:
    """Statistics of how often the weights of a kernel jump back to their previous level.

    Args:
        weights: the variable.
        quantizer: its `WeightQuantizer`.
        momentum: the momentum of the moving averages.
    """

    def __init__(self, weights: Any, quantizer: WeightQuantizer, momentum: float) -> None:
        self.weights, self.quantizer, self.momentum = weights, quantizer, momentum
        codes = quantizer.codes(tf.convert_to_tensor(weights))
        zeros = tf.zeros_like(codes)
        self.codes, self.direction, self.mean = map(tf.Variable, (codes, zeros, codes))
        self.frequency, self.frozen = tf.Variable(zeros), tf.Variable(zeros)
        """`frozen` is 1 where a weight stays at its mean level."""

    def update(self, threshold: Any) -> None:
        """Updates the statistics after a training step, and freezes weights that oscillate."""
        weights, rate = tf.convert_to_tensor(self.weights), self.momentum
        codes = self.quantizer.codes(weights)
        change = tf.sign(codes - self.codes)
        turned = tf.cast(change * self.direction < 0, tf.float32)
        self.codes.assign(codes)
        self.direction.assign(tf.where(change == 0, self.direction, change))
        self.frequency.assign_add(rate * (turned - self.frequency))
        is_free = self.frozen == 0
        self.mean.assign_add(tf.where(is_free, rate * (codes - self.mean), 0.0))
        stops = tf.logical_and(is_free, self.frequency > threshold)
        self.mean.assign(tf.where(stops, tf.round(self.mean), self.mean))
        self.frozen.assign(tf.where(stops, 1.0, self.frozen))
        scale = self.quantizer.limits(weights) / float(2 ** (self.quantizer.spec.bits - 1) - 1)
        self.weights.assign(tf.where(self.frozen > 0, self.mean * scale, weights))
