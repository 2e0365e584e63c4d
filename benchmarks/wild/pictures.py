"""Networks for pictures written by hand: restoration, generation, gates and norms of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.wild.blocks import conv
from keras_qat.keras2.backend import keras

__all__ = ["PICTURES"]

layers: Any = keras.layers


class GlobalResponse(layers.Layer):
    """Of ConvNeXt V2: channels by their norm over all others' mean."""

    def build(self, input_shape: Any) -> None:
        self.gamma = self.add_weight("gamma", input_shape[-1:], initializer="ones")
        self.beta = self.add_weight("beta", input_shape[-1:], initializer="zeros")

    def call(self, x: Any) -> Any:
        size = tf.sqrt(tf.reduce_sum(tf.square(x), axis=[1, 2], keepdims=True) + 1e-6)
        share = size / (tf.reduce_mean(size, axis=-1, keepdims=True) + 1e-6)
        return self.gamma * (x * share) + self.beta + x


def conv_next_v2() -> Any:
    """Two blocks."""
    inputs = keras.Input((32, 32, 3))
    x = layers.LayerNormalization()(layers.Conv2D(16, 4, 4)(inputs))
    for _ in range(2):
        y = layers.LayerNormalization()(layers.DepthwiseConv2D(7, padding="same")(x))
        y = GlobalResponse()(layers.Dense(32, activation="gelu")(y))
        x = x + layers.Dense(16)(y)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


class TimeEmbedding(layers.Layer):
    """Sines and cosines of a step, as DDPM embeds it."""

    def call(self, t: Any) -> Any:
        frequencies = tf.exp(-tf.math.log(1000.0) * tf.range(8, dtype=tf.float32) / 8.0)
        angles = t * frequencies[None]
        return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)


def diffusion() -> Any:
    """A U-Net of DDPM with group norms, a step among its inputs."""
    image, time = keras.Input((16, 16, 3)), keras.Input((1,))
    embedded = layers.Dense(16, activation="swish")(TimeEmbedding()(time))

    def block(x: Any, filters: int) -> Any:
        y = layers.Conv2D(filters, 3, padding="same")(x)
        y = y + layers.Dense(filters)(embedded)[:, None, None, :]
        y = layers.Activation("swish")(layers.GroupNormalization(4)(y))
        return layers.Conv2D(filters, 3, padding="same")(y) + layers.Conv2D(filters, 1)(x)

    skip = block(image, 16)
    x = block(layers.AveragePooling2D()(skip), 16)
    x = layers.Concatenate()([layers.UpSampling2D(interpolation="bilinear")(x), skip])
    return keras.Model([image, time], layers.Conv2D(3, 3, padding="same")(block(x, 16)))


class Sampling(layers.Layer):
    """A normal sample in training, the mean otherwise."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        mean, log_variance = inputs
        if not training:
            return mean
        noise = tf.random.normal(tf.shape(mean))
        return mean + tf.exp(0.5 * log_variance) * noise


def variational() -> Any:
    """A variational autoencoder."""
    inputs = keras.Input((16, 16, 1))
    x = layers.Flatten()(conv(conv(inputs, 8, strides=2), 16, strides=2))
    z = Sampling()([layers.Dense(4)(x), layers.Dense(4)(x)])
    x = layers.Reshape((4, 4, 16))(layers.Dense(256, "relu")(z))
    for filters in (16, 8):
        x = layers.Conv2DTranspose(filters, 3, 2, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x))


class VectorQuantizer(layers.Layer):
    """The nearest code of a book, by distances and argmin."""

    def build(self, input_shape: Any) -> None:
        self.codes = self.add_weight("codes", (8, 12))

    def call(self, x: Any) -> Any:
        flat = tf.reshape(x, [-1, 8])
        distances = (
            tf.reduce_sum(flat**2, axis=1, keepdims=True)
            + tf.reduce_sum(self.codes**2, axis=0)
            - 2 * tf.matmul(flat, self.codes)
        )
        chosen = tf.one_hot(tf.argmin(distances, axis=1), 12)
        return tf.reshape(tf.matmul(chosen, self.codes, transpose_b=True), tf.shape(x))


def vq_vae() -> Any:
    """Codes of a learned book."""
    inputs = keras.Input((16, 16, 1))
    x = VectorQuantizer()(layers.Conv2D(8, 1)(conv(inputs, 16, strides=2)))
    x = layers.Conv2DTranspose(8, 3, 2, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(x))


class AdaIN(layers.Layer):
    """A style's mean and deviation in place of the content's."""

    def call(self, inputs: Any) -> Any:
        content, style = inputs
        mean, variance = tf.nn.moments(content, [1, 2], keepdims=True)
        style_mean, style_variance = tf.nn.moments(style, [1, 2], keepdims=True)
        normal = (content - mean) / tf.sqrt(variance + 1e-5)
        return normal * tf.sqrt(style_variance + 1e-5) + style_mean


def style_transfer() -> Any:
    """Content and style images."""
    images = [keras.Input((16, 16, 3)) for _ in range(2)]
    encode = keras.Sequential([layers.Conv2D(8, 3, 2, padding="same", activation="relu")])
    x = AdaIN()([encode(image) for image in images])
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(layers.UpSampling2D()(x))
    return keras.Model(images, layers.Conv2D(3, 3, padding="same")(x))


class PixelNorm(layers.Layer):
    """Of progressive GANs."""

    def call(self, x: Any) -> Any:
        return x * tf.math.rsqrt(tf.reduce_mean(x**2, axis=-1, keepdims=True) + 1e-8)


def progressive() -> Any:
    """A generator of a progressive GAN."""
    inputs = keras.Input((16,))
    x = layers.Reshape((4, 4, 8))(layers.Dense(128)(PixelNorm()(inputs)))
    for _ in range(2):
        x = layers.UpSampling2D()(PixelNorm()(layers.LeakyReLU(0.2)(x)))
        x = layers.Conv2D(8, 3, padding="same")(x)
    return keras.Model(inputs, layers.Conv2D(3, 1)(x))


def low_light() -> Any:
    """Zero-DCE: curves applied again and again."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    curves = layers.Conv2D(12, 3, padding="same", activation="tanh")(x)

    def enhance(t: Any) -> Any:
        x, curves = t
        for curve in tf.split(curves, 4, axis=-1):
            x = x + curve * (tf.square(x) - x)
        return x

    return keras.Model(inputs, layers.Lambda(enhance)([inputs, curves]))


def resized() -> Any:
    """Segmentation that resizes by tf.compat.v1 and tf.image to the sizes of other tensors."""
    inputs = keras.Input((32, 32, 3))
    high = conv(inputs, 8, strides=2)
    low = conv(conv(high, 16, strides=2), 16, strides=2)
    pooled = layers.Lambda(lambda t: tf.reduce_mean(t, [1, 2], keepdims=True))(low)
    pooled = layers.Conv2D(8, 1, activation="relu")(pooled)

    def like(t: Any) -> Any:
        x, other = t
        return tf.compat.v1.image.resize_bilinear(x, tf.shape(other)[1:3], align_corners=True)

    x = layers.Concatenate()([low, layers.Lambda(like)([pooled, low])])
    x = layers.Conv2D(8, 1)(x)
    x = layers.Lambda(lambda t: tf.compat.v1.image.resize_nearest_neighbor(t, (16, 16)))(x)
    x = layers.Conv2D(4, 3, padding="same")(layers.Concatenate()([x, high]))
    x = layers.Lambda(lambda t: tf.image.resize(t, (32, 32)))(x)
    return keras.Model(inputs, layers.Lambda(lambda t: tf.argmax(t, axis=-1))(x))


def coordinate_convolution() -> Any:
    """CoordConv: coordinates of pixels as channels, for each image."""

    class Coordinates(layers.Layer):
        """Adds two channels."""

        def call(self, x: Any) -> Any:
            count, height, width = tf.shape(x)[0], x.shape[1], x.shape[2]
            rows = tf.linspace(-1.0, 1.0, height)[None, :, None, None]
            columns = tf.linspace(-1.0, 1.0, width)[None, None, :, None]
            rows = tf.tile(rows, [count, 1, width, 1])
            columns = tf.tile(columns, [count, height, 1, 1])
            return tf.concat([x, rows, columns], axis=-1)

    inputs = keras.Input((16, 16, 3))
    x = conv(Coordinates()(inputs), 8, strides=2)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalMaxPooling2D()(x)))


class StandardizedConv(layers.Conv2D):
    """A convolution with standardized weights, as BiT and NFNet have."""

    def call(self, x: Any) -> Any:
        mean, variance = tf.nn.moments(self.kernel, axes=[0, 1, 2], keepdims=True)
        kernel = (self.kernel - mean) / tf.sqrt(variance + 1e-10)
        return tf.nn.conv2d(x, kernel, strides=1, padding="SAME") + self.bias


def standardized() -> Any:
    """Standardized convolutions and group norms."""
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for _ in range(2):
        x = layers.ReLU()(layers.GroupNormalization(4)(StandardizedConv(8, 3)(x)))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


class ArcFace(layers.Layer):
    """Cosines of features and classes, both of length 1."""

    def build(self, input_shape: Any) -> None:
        self.w = self.add_weight("w", (input_shape[-1], 10))

    def call(self, x: Any) -> Any:
        x, w = tf.nn.l2_normalize(x, axis=1), tf.nn.l2_normalize(self.w, axis=0)
        return tf.matmul(x, w) * 30.0


def arc_face() -> Any:
    """Faces by cosines."""
    inputs = keras.Input((32, 32, 3))
    x = layers.GlobalAveragePooling2D()(conv(conv(inputs, 16, strides=2), 32, strides=2))
    return keras.Model(inputs, ArcFace()(layers.Dense(16)(x)))


def squeezed() -> Any:
    """EfficientNet-like gates by hand, generalized mean pooling."""
    inputs = keras.Input((32, 32, 3))
    x = conv(inputs, 16, strides=2)
    gate = layers.Lambda(lambda t: tf.reduce_mean(t, axis=[1, 2], keepdims=True))(x)
    gate = layers.Conv2D(16, 1, activation="sigmoid")(layers.Conv2D(4, 1, activation="swish")(gate))
    x = layers.Conv2D(16, 1)(x * gate)

    def pooled(t: Any) -> Any:
        t = tf.maximum(t, 1e-6) ** 3
        return tf.reduce_mean(t, axis=[1, 2]) ** (1 / 3)

    return keras.Model(inputs, layers.Dense(10)(layers.Lambda(pooled)(x)))


def spatial_transformer() -> Any:
    """A soft crop: a window of Gaussians at a predicted center."""
    inputs = keras.Input((16, 16, 3))
    x = layers.Flatten()(conv(inputs, 4, strides=2))
    center = layers.Dense(2, "tanh")(x)

    def window(t: Any) -> Any:
        image, center = t
        steps = tf.linspace(-1.0, 1.0, 16)
        rows, columns = (
            tf.exp(-4.0 * tf.square(steps[None] - center[:, i : i + 1])) for i in (0, 1)
        )
        return image * rows[:, :, None, None] * columns[:, None, :, None]

    x = conv(layers.Lambda(window)([inputs, center]), 8, strides=2)
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


class SelfAttention2D(layers.Layer):
    """Of SAGAN: attention over pixels times a learned number."""

    def __init__(self, filters: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.f, self.g = layers.Conv2D(filters // 4, 1), layers.Conv2D(filters // 4, 1)
        self.h = layers.Conv2D(filters, 1)

    def build(self, input_shape: Any) -> None:
        self.gamma = self.add_weight("gamma", (1,), initializer="ones")

    def call(self, x: Any) -> Any:
        _, height, width, filters = x.shape
        f, g, h = (
            tf.reshape(layer(x), [-1, height * width, size])
            for layer, size in ((self.f, filters // 4), (self.g, filters // 4), (self.h, filters))
        )
        attention = tf.nn.softmax(tf.matmul(g, f, transpose_b=True))
        return self.gamma * tf.reshape(tf.matmul(attention, h), tf.shape(x)) + x


def self_attention() -> Any:
    """A discriminator of SAGAN."""
    inputs = keras.Input((16, 16, 3))
    x = SelfAttention2D(16)(layers.LeakyReLU()(layers.Conv2D(16, 3, 2, padding="same")(inputs)))
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))


PICTURES: tuple[Callable[[], Any], ...] = (
    *(conv_next_v2, diffusion, variational, vq_vae, style_transfer, progressive, low_light),
    *(resized, coordinate_convolution, standardized, arc_face, squeezed, spatial_transformer),
    *(self_attention,),
)
