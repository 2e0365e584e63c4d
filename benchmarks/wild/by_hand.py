"""Networks written by hand, as one finds them: small, with all their peculiarities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.wild.blocks import conv
from benchmarks.wild.detectors import DETECTORS
from benchmarks.wild.graphs_and_tables import GRAPHS_AND_TABLES
from benchmarks.wild.pictures import PICTURES
from benchmarks.wild.sequences_and_columns import SEQUENCES_AND_COLUMNS
from benchmarks.wild.signals import SIGNALS
from benchmarks.wild.tables_and_texts import TABLES_AND_TEXTS
from benchmarks.wild.tokens import TOKENS
from benchmarks.wild.transformers import TRANSFORMERS
from keras_qat.keras2.backend import keras

__all__ = ["BY_HAND"]

layers: Any = keras.layers


def mish(x: Any) -> Any:
    """The activation x tanh(softplus(x))."""
    return x * tf.math.tanh(tf.math.softplus(x))


def yolo_v4() -> Any:
    """Darknet with mish, spatial pyramid pooling, two heads that are decoded in Lambdas."""
    inputs = keras.Input((64, 64, 3))
    x = conv(layers.Lambda(lambda t: t / 255.0)(inputs), 8, 3, 2, mish)
    skip = x
    x = layers.Add()([skip, conv(conv(x, 4, 1, activation=mish), 8, activation=mish)])
    first = conv(x, 16, 3, 2, mish)
    x = conv(first, 32, 3, 2, mish)
    pools = [layers.MaxPooling2D(size, 1, padding="same")(x) for size in (5, 9, 13)]
    x = conv(layers.Concatenate()([*pools, x]), 32, 1)
    up = layers.UpSampling2D()(conv(x, 16, 1, activation=tf.nn.leaky_relu))
    heads = [layers.Conv2D(21, 1)(item) for item in (layers.Concatenate()([up, first]), x)]

    def decode(t: Any) -> Any:
        box, rest = t[..., :2], t[..., 2:]
        return tf.concat([tf.sigmoid(box) * 1.2 - 0.1, rest], axis=-1)

    return keras.Model(inputs, [layers.Lambda(decode)(head) for head in heads])


def crnn() -> Any:
    """Text recognition: convolutions, the columns as a sequence, two recurrent layers."""
    inputs = keras.Input((32, 64, 1))
    x = layers.MaxPooling2D()(conv(inputs, 8))
    x = layers.MaxPooling2D((2, 1))(conv(x, 16))
    x = layers.Permute((2, 1, 3))(x)
    x = layers.Reshape((32, 8 * 16))(x)
    x = layers.Bidirectional(layers.LSTM(16, return_sequences=True))(x)
    x = layers.Bidirectional(layers.GRU(16, return_sequences=True))(x)
    return keras.Model(inputs, layers.Dense(40, activation="softmax")(x))


class InstanceNormalization(layers.Layer):
    """Each channel of each image by itself."""

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight("scale", input_shape[-1:], initializer="ones")
        self.offset = self.add_weight("offset", input_shape[-1:], initializer="zeros")

    def call(self, x: Any) -> Any:
        mean, variance = tf.nn.moments(x, axes=[1, 2], keepdims=True)
        return self.scale * (x - mean) * tf.math.rsqrt(variance + 1e-5) + self.offset


class ReflectionPadding2D(layers.Layer):
    """Padding by reflection."""

    def __init__(self, padding: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.padding = padding

    def call(self, x: Any) -> Any:
        sides = [self.padding, self.padding]
        return tf.pad(x, [[0, 0], sides, sides, [0, 0]], "REFLECT")


def pix2pix() -> Any:
    """A generator with skips, dropout in front of ReLUs, transposed convolutions."""
    inputs = keras.Input((64, 64, 3))
    down, x = [], inputs
    for filters in (8, 16, 32):
        x = layers.Conv2D(filters, 4, 2, padding="same", use_bias=False)(x)
        x = layers.LeakyReLU()(layers.BatchNormalization()(x))
        down.append(x)
    for skip in (down[1], down[0]):
        x = layers.Conv2DTranspose(skip.shape[-1], 4, 2, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.Dropout(0.5)(layers.BatchNormalization()(x)))
        x = layers.Concatenate()([x, skip])
    x = layers.Conv2DTranspose(3, 4, 2, padding="same", activation="tanh")(x)
    return keras.Model(inputs, x)


def cycle_gan() -> Any:
    """A generator with reflection padding and instance normalization."""
    inputs = keras.Input((64, 64, 3))
    x = layers.Conv2D(8, 7)(ReflectionPadding2D(3)(inputs))
    x = layers.ReLU()(InstanceNormalization()(x))
    for _ in range(2):
        y = layers.Conv2D(8, 3)(ReflectionPadding2D()(x))
        y = layers.ReLU()(InstanceNormalization()(y))
        x = layers.add([x, InstanceNormalization()(layers.Conv2D(8, 3)(ReflectionPadding2D()(y)))])
    return keras.Model(inputs, layers.Conv2D(3, 7, activation="tanh")(ReflectionPadding2D(3)(x)))


def discriminator() -> Any:
    """PatchGAN."""
    x = inputs = keras.Input((64, 64, 6))
    for filters in (8, 16, 32):
        x = layers.LeakyReLU(0.2)(layers.Conv2D(filters, 4, 2, padding="same")(x))
    return keras.Model(inputs, layers.Conv2D(1, 4)(layers.ZeroPadding2D()(x)))


class SubPixel(layers.Layer):
    """Depth to space."""

    def call(self, x: Any) -> Any:
        return tf.nn.depth_to_space(x, 2)


def super_resolution() -> Any:
    """EDSR: residual blocks scaled by 0.1, sub-pixel convolution."""
    inputs = keras.Input((24, 24, 3))
    x = first = layers.Conv2D(16, 3, padding="same")(layers.Rescaling(1 / 127.5, -1)(inputs))
    for _ in range(3):
        y = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
        y = layers.Conv2D(16, 3, padding="same")(y)
        x = layers.Add()([x, layers.Lambda(lambda t: t * 0.1)(y)])
    x = layers.Add()([first, x])
    x = SubPixel()(layers.Conv2D(64, 3, padding="same")(x))
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same")(x))


def keyword_spotting() -> Any:
    """DS-CNN of MLPerf Tiny."""
    inputs = keras.Input((49, 10, 1))
    x = conv(inputs, 16, (10, 4), (2, 2))
    for _ in range(3):
        x = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
        x = conv(layers.ReLU()(layers.BatchNormalization()(x)), 16, 1)
    x = layers.AveragePooling2D(x.shape[1:3])(layers.Dropout(0.4)(x))
    return keras.Model(inputs, layers.Dense(12, activation="softmax")(layers.Flatten()(x)))


def raw_audio() -> Any:
    """M5 on the waveform."""
    x = inputs = keras.Input((1024, 1))
    for filters, size, strides in ((16, 80, 4), (16, 3, 1), (32, 3, 1)):
        x = layers.Conv1D(filters, size, strides, padding="same")(x)
        x = layers.MaxPooling1D(4)(layers.ReLU()(layers.BatchNormalization()(x)))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


class ResidualBlock(layers.Layer):
    """Of a temporal convolutional network: two causal convolutions and a way past them."""

    def __init__(self, filters: int, dilation: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        options = {"padding": "causal", "dilation_rate": dilation}
        self.convolutions = [layers.Conv1D(filters, 3, **options) for _ in range(2)]
        self.match = layers.Conv1D(filters, 1)
        self.drop = layers.SpatialDropout1D(0.1)

    def call(self, x: Any, training: Any = None) -> Any:
        y = x
        for convolution in self.convolutions:
            y = self.drop(tf.nn.relu(convolution(y)), training=training)
        return tf.nn.relu(y + self.match(x))


def temporal() -> Any:
    """A temporal convolutional network of composite layers."""
    x = inputs = keras.Input((64, 4))
    for dilation in (1, 2, 4):
        x = ResidualBlock(8, dilation)(x)
    return keras.Model(inputs, layers.Dense(5)(layers.Lambda(lambda t: t[:, -1, :])(x)))


def shuffle_net() -> Any:
    """Channel split and shuffle in Lambdas."""

    def shuffle(t: Any) -> Any:
        height, width, channels = t.shape[1:]
        t = tf.reshape(t, [-1, height, width, 2, channels // 2])
        return tf.reshape(tf.transpose(t, [0, 1, 2, 4, 3]), [-1, height, width, channels])

    inputs = keras.Input((32, 32, 3))
    x = conv(layers.Lambda(lambda t: t / 127.5 - 1.0)(inputs), 16, 3, 2)
    for _ in range(3):
        left, right = layers.Lambda(lambda t: tf.split(t, 2, axis=-1))(x)
        right = layers.DepthwiseConv2D(3, padding="same")(conv(right, 8, 1))
        x = layers.Lambda(shuffle)(layers.Concatenate()([left, conv(right, 8, 1)]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def attention_gates() -> Any:
    """CBAM: means and maxima over channels in Lambdas, gates."""
    inputs = keras.Input((32, 32, 3))
    x = conv(inputs, 16)
    pools = [layers.GlobalAveragePooling2D()(x), layers.GlobalMaxPooling2D()(x)]
    shared = [layers.Dense(4, activation="relu"), layers.Dense(16)]
    gates = layers.Add()([shared[1](shared[0](pool)) for pool in pools])
    x = layers.Multiply()([x, layers.Reshape((1, 1, 16))(layers.Activation("sigmoid")(gates))])
    mean = layers.Lambda(lambda t: tf.reduce_mean(t, axis=3, keepdims=True))(x)
    peak = layers.Lambda(lambda t: tf.reduce_max(t, axis=3, keepdims=True))(x)
    gate = layers.Conv2D(1, 7, padding="same", activation="sigmoid")(
        layers.Concatenate()([mean, peak])
    )
    x = layers.GlobalAveragePooling2D()(layers.Multiply()([x, gate]))
    return keras.Model(inputs, layers.Dense(10)(x))


def siamese() -> Any:
    """Two images through one network, and their distance in a Lambda."""
    one = keras.Input((32, 32, 1))
    x = layers.Flatten()(layers.MaxPooling2D()(conv(layers.MaxPooling2D()(conv(one, 8)), 16)))
    tower = keras.Model(one, layers.Dense(16, activation="sigmoid")(x))
    pair = [keras.Input((32, 32, 1)) for _ in range(2)]
    away = layers.Lambda(lambda t: tf.abs(t[0] - t[1]))([tower(item) for item in pair])
    return keras.Model(pair, layers.Dense(1, activation="sigmoid")(away))


def pose() -> Any:
    """Heat maps with a soft-argmax head left out, hourglass."""
    inputs = keras.Input((64, 64, 3))
    skips, x = [], conv(inputs, 16, 7, 2)
    for _ in range(2):
        skips.append(conv(x, 16))
        x = layers.MaxPooling2D()(conv(x, 16))
    for skip in reversed(skips):
        x = layers.Add()([layers.UpSampling2D(interpolation="bilinear")(conv(x, 16)), skip])
    return keras.Model(inputs, layers.Conv2D(17, 1)(x))


def center_net() -> Any:
    """Heat maps with a focal-loss bias, and their peaks."""
    inputs = keras.Input((64, 64, 3))
    x = conv(conv(inputs, 16, 3, 2), 16, 3, 2)
    options = {"bias_initializer": keras.initializers.Constant(-2.19), "activation": "sigmoid"}
    heat = layers.Conv2D(4, 1, **options)(x)
    peaks = layers.MaxPooling2D(3, 1, padding="same")(heat)
    return keras.Model(inputs, [heat, peaks, layers.Conv2D(2, 1)(x)])


def sensors() -> Any:
    """Human activity: convolutions, a GRU, statistics."""
    inputs = keras.Input((64, 6))
    x = layers.Conv1D(16, 5, activation="relu")(
        layers.Normalization(mean=0.0, variance=1.0)(inputs)
    )
    x = layers.GRU(16)(layers.MaxPooling1D()(x))
    more = layers.Lambda(lambda t: tf.reduce_max(t, axis=1) - tf.reduce_min(t, axis=1))(inputs)
    return keras.Model(inputs, layers.Dense(6)(layers.Concatenate()([x, more])))


BY_HAND: dict[str, Callable[[], Any]] = {
    f"by hand {build.__name__}": build
    for build in (
        *(yolo_v4, crnn, pix2pix, cycle_gan, discriminator, super_resolution, keyword_spotting),
        *(raw_audio, temporal, shuffle_net, attention_gates, siamese, pose, center_net, sensors),
        *(*TABLES_AND_TEXTS, *DETECTORS, *TRANSFORMERS, *SIGNALS, *GRAPHS_AND_TABLES, *PICTURES),
        *(*TOKENS, *SEQUENCES_AND_COLUMNS),
    )
}
