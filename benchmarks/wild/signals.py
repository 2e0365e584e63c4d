"""Sound, sensors, series and scenes written by hand, with the statistics people compute in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.wild.blocks import conv
from keras_qat.keras2.backend import keras

__all__ = ["SIGNALS"]

layers: Any = keras.layers


def log_mel() -> Any:
    """Powers of a spectrum, a constant filter bank, a logarithm, convolutions."""
    inputs = keras.Input((32, 65))
    bank = np.abs(np.random.default_rng(0).normal(size=(65, 16))).astype(np.float32)
    x = layers.Lambda(lambda t: tf.math.log(tf.matmul(tf.square(t), bank) + 1e-6))(inputs)
    x = layers.Reshape((32, 16, 1))(x)
    x = layers.GlobalAveragePooling2D()(conv(conv(x, 8, strides=2), 16))
    return keras.Model(inputs, layers.Dense(4)(x))


class StatisticsPooling(layers.Layer):
    """Means and deviations over time, as x-vectors have."""

    def call(self, x: Any) -> Any:
        mean, variance = tf.nn.moments(x, axes=[1])
        return tf.concat([mean, tf.sqrt(variance + 1e-6)], axis=-1)


def x_vector() -> Any:
    """Speaker recognition, an embedding of length 1."""
    inputs = keras.Input((40, 12))
    x = layers.Conv1D(16, 5, activation="relu")(inputs)
    x = layers.Conv1D(16, 3, dilation_rate=2, activation="relu")(x)
    x = layers.Dense(16)(StatisticsPooling()(x))
    return keras.Model(inputs, layers.Lambda(lambda t: tf.math.l2_normalize(t, axis=1))(x))


def wave_net() -> Any:
    """Gated dilated convolutions with skips."""
    x = inputs = keras.Input((64, 8))
    x, skips = layers.Conv1D(16, 1)(x), []
    for dilation in (1, 2, 4):
        options = {"padding": "causal", "dilation_rate": dilation}
        gate = layers.Conv1D(16, 2, activation="sigmoid", **options)(x)
        y = layers.Conv1D(16, 2, activation="tanh", **options)(x) * gate
        skips.append(layers.Conv1D(16, 1)(y))
        x = x + layers.Conv1D(16, 1)(y)
    y = layers.ReLU()(layers.Lambda(lambda t: tf.reduce_sum(t, axis=0))(skips))
    return keras.Model(inputs, layers.Conv1D(8, 1)(y))


def conv_tas_net() -> Any:
    """Separation: masks by softmax over two speakers, times the encoded mixture."""
    inputs = keras.Input((128, 1))
    coded = layers.Conv1D(16, 8, strides=4, activation="relu", padding="same")(inputs)
    x = layers.LayerNormalization()(coded)
    for dilation in (1, 2):
        y = layers.PReLU(shared_axes=[1])(layers.Conv1D(32, 1)(x))
        y = layers.DepthwiseConv1D(3, padding="same", dilation_rate=dilation)(y)
        x = x + layers.Conv1D(16, 1)(y)
    masks = layers.Softmax(2)(layers.Reshape((32, 2, 16))(layers.Conv1D(32, 1)(x)))
    masked = layers.Lambda(lambda t: t[0] * t[1][:, :, tf.newaxis])([masks, coded])
    speakers = layers.Lambda(lambda t: tf.unstack(t, axis=2))(masked)
    decode = layers.Conv1DTranspose(1, 8, strides=4, padding="same")
    return keras.Model(inputs, [decode(speaker) for speaker in speakers])


class GLU(layers.Layer):
    """Halves of channels: one gates the other."""

    def call(self, x: Any) -> Any:
        out, gate = tf.split(x, 2, axis=-1)
        return out * tf.sigmoid(gate)


def conformer() -> Any:
    """Feed-forward halves, attention, gated convolutions."""
    inputs = keras.Input((24, 16))
    x = layers.Dense(32)(inputs)
    y = layers.Dense(64, activation=tf.nn.swish)(layers.LayerNormalization()(x))
    x = x + 0.5 * layers.Dense(32)(y)
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 16)(y, y)
    y = GLU()(layers.Conv1D(64, 1)(layers.LayerNormalization()(x)))
    y = layers.BatchNormalization()(layers.DepthwiseConv1D(7, padding="same")(y))
    x = x + layers.Conv1D(32, 1)(layers.Activation(tf.nn.swish)(y))
    return keras.Model(inputs, layers.Dense(20)(layers.LayerNormalization()(x)))


class RevIN(layers.Layer):
    """Normalizes a series by its own mean and deviation."""

    def call(self, x: Any) -> Any:
        mean = tf.reduce_mean(x, axis=1, keepdims=True)
        deviation = tf.math.reduce_std(x, axis=1, keepdims=True)
        return (x - mean) / (deviation + 1e-5)


def patch_tst() -> Any:
    """A series in patches, normalized by itself."""
    inputs = keras.Input((32, 4))
    x = RevIN()(inputs)
    x = layers.Lambda(lambda t: tf.transpose(tf.reshape(t, [-1, 8, 4, 4]), [0, 3, 1, 2]))(x)
    x = layers.Dense(16)(x)
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, "gelu")(x)))
    x = layers.Dense(6)(layers.Reshape((4, 128))(x))
    return keras.Model(inputs, layers.Permute((2, 1))(x))


def dlinear() -> Any:
    """A moving average and the rest, a linear layer for each."""
    inputs = keras.Input((32, 4))

    def trend(t: Any) -> Any:
        front, end = (tf.repeat(t[:, i : i + 1], 2, axis=1) for i in (0, 31))
        return tf.nn.avg_pool1d(tf.concat([front, t, end], 1), 5, 1, "VALID")

    slow = layers.Lambda(trend)(inputs)
    parts = [layers.Permute((2, 1))(item) for item in (slow, inputs - slow)]
    x = layers.Add()([layers.Dense(8)(part) for part in parts])
    return keras.Model(inputs, layers.Permute((2, 1))(x))


class NBeatsBlock(layers.Layer):
    """A trend by polynomials and seasons by sines, of learned coefficients."""

    def __init__(self, steps: int, ahead: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden, self.theta = layers.Dense(32, "relu"), layers.Dense(8)
        time = np.arange(steps + ahead, dtype=np.float32) / steps
        waves = [f(2 * np.pi * k * time) for k in (1, 2) for f in (np.cos, np.sin)]
        basis = np.stack([*(time**power for power in range(4)), *waves])
        self.steps, self.basis = steps, tf.constant(basis.astype(np.float32))

    def call(self, x: Any) -> Any:
        series = tf.matmul(self.theta(self.hidden(x)), self.basis)
        return series[:, : self.steps], series[:, self.steps :]


def n_beats() -> Any:
    """Blocks whose back casts are subtracted."""
    x = inputs = keras.Input((24,))
    total = None
    for _ in range(2):
        past, future = NBeatsBlock(24, 6)(x)
        x, total = layers.Subtract()([x, past]), future if total is None else total + future
    return keras.Model(inputs, total)


class Time2Vec(layers.Layer):
    """One linear feature of time and sines of others."""

    def build(self, input_shape: Any) -> None:
        self.w = self.add_weight("w", (input_shape[-1], 7))
        self.b = self.add_weight("b", (7,))

    def call(self, x: Any) -> Any:
        return tf.concat([x, tf.sin(tf.matmul(x, self.w) + self.b)], -1)


def time_vectors() -> Any:
    """Sensors with features of time."""
    inputs = keras.Input((32, 2))
    x = layers.Conv1D(16, 3, activation="relu")(Time2Vec()(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling1D()(x)))


def anomaly() -> Any:
    """An autoencoder that returns its own error for each example."""
    inputs = keras.Input((32,))
    x = layers.Dense(32)(layers.Dense(8, "relu")(layers.Dense(16, "relu")(inputs)))
    error = layers.Lambda(lambda t: tf.reduce_mean(tf.square(t[0] - t[1]), axis=-1))([inputs, x])
    return keras.Model(inputs, [x, error])


def nerf() -> Any:
    """Sines and cosines of coordinates, layers with a skip."""
    inputs = keras.Input((3,))

    def encode(t: Any) -> Any:
        turned = [f(t * 2.0**i * np.pi) for i in range(3) for f in (tf.sin, tf.cos)]
        return tf.concat([t, *turned], axis=-1)

    coded = layers.Lambda(encode)(inputs)
    x = layers.Dense(32, "relu")(layers.Dense(32, "relu")(coded))
    x = layers.Dense(32, "relu")(layers.Concatenate()([x, coded]))
    return keras.Model(inputs, [layers.Dense(3, "sigmoid")(x), layers.Dense(1, "relu")(x)])


class Sine(layers.Layer):
    """sin(30 x), of SIREN."""

    def call(self, x: Any) -> Any:
        return tf.math.sin(30.0 * x)


def siren() -> Any:
    """Sines as activations."""
    x = inputs = keras.Input((2,))
    for _ in range(2):
        small = keras.initializers.RandomUniform(-0.03, 0.03)
        x = Sine()(layers.Dense(32, kernel_initializer=small)(x))
    return keras.Model(inputs, layers.Dense(3)(x))


def pulses() -> Any:
    """Signs and magnitudes, thresholds by tf.where, counts of crossings."""
    inputs = keras.Input((64, 3))

    def features(t: Any) -> Any:
        quiet = tf.where(tf.abs(t) < 0.5, tf.zeros_like(t), t)
        crossings = tf.cast(t[:, 1:] * t[:, :-1] < 0.0, tf.float32)
        energy = tf.sqrt(tf.reduce_mean(tf.square(t), axis=1) + 1e-6)
        return tf.concat([tf.reduce_mean(crossings, 1), energy, tf.reduce_max(quiet, 1)], -1)

    x = layers.Dense(16, "relu")(layers.Lambda(features)(inputs))
    return keras.Model(inputs, layers.Dense(4)(x))


def magnitude() -> Any:
    """Length of three axes, and their sum so far."""
    inputs = keras.Input((32, 3))
    length = layers.Lambda(lambda t: tf.norm(t, axis=-1, keepdims=True))(inputs)
    moved = layers.Lambda(lambda t: tf.cumsum(t, axis=1) * 0.1)(inputs)
    x = layers.Conv1D(8, 3, activation="relu")(layers.Concatenate()([inputs, length, moved]))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


SIGNALS: tuple[Callable[[], Any], ...] = (
    *(log_mel, x_vector, wave_net, conv_tas_net, conformer, patch_tst, dlinear, n_beats),
    *(time_vectors, anomaly, nerf, siren, pulses, magnitude),
)
