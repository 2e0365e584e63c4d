"""Pictures by tokens, windows and mixers, and convolutions that people invent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras

__all__ = ["TOKENS"]

layers: Any = keras.layers


class Patches(layers.Layer):
    """Square patches as vectors, as in the Keras examples of vision transformers."""

    def __init__(self, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = size

    def call(self, images: Any) -> Any:
        batch = tf.shape(images)[0]
        sizes = [1, self.size, self.size, 1]
        patches = tf.image.extract_patches(images, sizes, sizes, [1, 1, 1, 1], "VALID")
        _, rows, columns, values = patches.shape
        return tf.reshape(patches, [batch, rows * columns, values])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "size": self.size}


class Positions(layers.Layer):
    """A learned vector for each patch, by an embedding of a range."""

    def build(self, input_shape: Any) -> None:
        self.count = input_shape[1]
        self.embedding = layers.Embedding(input_shape[1], input_shape[2])

    def call(self, x: Any) -> Any:
        return x + self.embedding(tf.range(start=0, limit=self.count, delta=1))


def classifier(inputs: Any, x: Any) -> Any:
    """A mean over tokens and a dense layer."""
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(5)(layers.Dropout(0.1)(x)))


def mlp_mixer() -> Any:
    """Dense layers across patches and across channels in turn."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Dense(16)(Patches(8)(inputs))
    for _ in range(2):
        y = layers.Permute((2, 1))(layers.LayerNormalization(epsilon=1e-6)(x))
        y = layers.Dense(16)(layers.Dense(16, activation="gelu")(y))
        x = layers.Add()([x, layers.Permute((2, 1))(y)])
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([x, layers.Dense(16)(layers.Dense(32, activation="gelu")(y))])
    return classifier(inputs, x)


def conv_mixer() -> Any:
    """Patches by a strided convolution, depthwise and pointwise layers with GELU and norm."""
    inputs = keras.Input((32, 32, 3))

    def activated(x: Any) -> Any:
        return layers.BatchNormalization()(layers.Activation("gelu")(x))

    x = activated(layers.Conv2D(16, 4, 4)(layers.Rescaling(1 / 255)(inputs)))
    for _ in range(2):
        y = activated(layers.DepthwiseConv2D(5, padding="same")(x))
        x = activated(layers.Conv2D(16, 1)(layers.Add()([y, x])))
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


class SpatialGating(layers.Layer):
    """gMLP: half of the channels, mixed across tokens, gates the other half."""

    def build(self, input_shape: Any) -> None:
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.project = layers.Dense(input_shape[1], bias_initializer="ones")

    def call(self, x: Any) -> Any:
        u, v = tf.split(x, num_or_size_splits=2, axis=-1)
        v = tf.linalg.matrix_transpose(self.norm(v))
        return u * tf.linalg.matrix_transpose(self.project(v))


def g_mlp() -> Any:
    """Two blocks."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Dense(16)(Patches(8)(inputs))
    for _ in range(2):
        y = layers.Dense(32, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
        x = x + layers.Dense(16)(SpatialGating()(y))
    return classifier(inputs, x)


class Latents(layers.Layer):
    """A learned array, the same for every example."""

    def build(self, input_shape: Any) -> None:
        self.array = self.add_weight("array", (1, 8, 16), initializer="random_normal")

    def call(self, x: Any) -> Any:
        return tf.tile(self.array, [tf.shape(x)[0], 1, 1])


def perceiver() -> Any:
    """Learned latents attend to all patches, then to themselves."""
    inputs = keras.Input((32, 32, 3))
    data = layers.LayerNormalization()(layers.Dense(16)(Patches(4)(inputs)))
    latents = Latents()(data)
    for _ in range(2):
        q = layers.Dense(16)(layers.LayerNormalization()(latents))
        k, v = (layers.Dense(16)(data) for _ in range(2))
        x = layers.Add()([layers.Attention(use_scale=True)([q, v, k]), latents])
        y = layers.LayerNormalization()(x)
        x = layers.Add()([layers.MultiHeadAttention(2, 8)(y, y), x])
        y = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
        latents = layers.Add()([layers.Dense(16)(y), x])
    return classifier(inputs, latents)


class WindowAttention(layers.Layer):
    """Swin: attention in windows, a learned bias by relative position, a mask where they wrap."""

    def __init__(self, size: int, heads: int, mask: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size, self.heads, self.mask = size, heads, mask
        rows, columns = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
        points = np.stack([rows.flatten(), columns.flatten()])
        apart = points[:, :, None] - points[:, None, :] + size - 1
        self.index = tf.constant(apart[0] * (2 * size - 1) + apart[1], tf.int32)

    def build(self, input_shape: Any) -> None:
        units = input_shape[-1]
        self.qkv, self.project = layers.Dense(3 * units), layers.Dense(units)
        self.table = self.add_weight("table", ((2 * self.size - 1) ** 2, self.heads))

    def call(self, x: Any) -> Any:
        _, size, units = x.shape
        qkv = tf.reshape(self.qkv(x), [-1, size, 3, self.heads, units // self.heads])
        q, k, v = tf.unstack(tf.transpose(qkv, perm=[2, 0, 3, 1, 4]), axis=0)
        scores = (q * (units // self.heads) ** -0.5) @ tf.transpose(k, perm=[0, 1, 3, 2])
        bias = tf.gather(self.table, tf.reshape(self.index, [-1]))
        bias = tf.transpose(tf.reshape(bias, [size, size, self.heads]), [2, 0, 1])
        scores = scores + tf.expand_dims(bias, axis=0)
        if self.mask is not None:
            windows = self.mask.shape[0]
            scores = tf.reshape(scores, [-1, windows, self.heads, size, size])
            scores = scores + tf.constant(self.mask[None, :, None], tf.float32)
            scores = tf.reshape(scores, [-1, self.heads, size, size])
        x = tf.transpose(tf.nn.softmax(scores, axis=-1) @ v, perm=[0, 2, 1, 3])
        return self.project(tf.reshape(x, [-1, size, units]))


def _wrapped(side: int, window: int, shift: int) -> np.ndarray:
    """Mask of pairs that meet in a window only because the picture was rolled."""
    regions = np.zeros((side, side))
    parts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for index, (rows, columns) in enumerate((r, c) for r in parts for c in parts):
        regions[rows, columns] = index
    count = side // window
    blocks = regions.reshape(count, window, count, window).transpose(0, 2, 1, 3)
    of_windows = blocks.reshape(-1, window * window)
    return np.where(of_windows[:, None] == of_windows[:, :, None], 0.0, -100.0)


def swin() -> Any:
    """A plain and a shifted block of windows, then merged patches."""
    inputs = keras.Input((32, 32, 3))
    x, side, window, units = layers.Conv2D(16, 4, 4)(inputs), 8, 4, 16
    for shift in (0, 2):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        if shift:
            y = tf.roll(y, shift=[-shift, -shift], axis=[1, 2])
        y = tf.reshape(y, [-1, side // window, window, side // window, window, units])
        y = tf.reshape(tf.transpose(y, [0, 1, 3, 2, 4, 5]), [-1, window * window, units])
        y = WindowAttention(window, 2, _wrapped(side, window, shift) if shift else None)(y)
        y = tf.reshape(y, [-1, side // window, side // window, window, window, units])
        y = tf.reshape(tf.transpose(y, [0, 1, 3, 2, 4, 5]), [-1, side, side, units])
        if shift:
            y = tf.roll(y, shift=[shift, shift], axis=[1, 2])
        x = x + y
        y = layers.Dense(32, activation="gelu")(layers.LayerNormalization(epsilon=1e-5)(x))
        x = x + layers.Dense(units)(y)
    corners = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
    x = layers.Dense(32, use_bias=False)(layers.LayerNormalization()(tf.concat(corners, -1)))
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


class SequencePooling(layers.Layer):
    """CCT: a weighted sum of tokens by scores of their own."""

    def build(self, input_shape: Any) -> None:
        self.attention = layers.Dense(1)

    def call(self, x: Any) -> Any:
        weights = tf.transpose(tf.nn.softmax(self.attention(x), axis=1), perm=(0, 2, 1))
        return tf.squeeze(tf.matmul(weights, x), -2)


def compact_transformer() -> Any:
    """CCT: a convolutional tokenizer, paths dropped at random, pooling of the sequence."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False, activation="relu")(inputs)
    x = layers.MaxPooling2D(3, 4, padding="same")(layers.ZeroPadding2D(1)(x))
    x = layers.Dropout(0.1)(Positions()(layers.Reshape((-1, 16))(x)))
    for _ in range(2):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 8, dropout=0.1)(y, y)])
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        y = layers.Dense(16, activation=tf.nn.gelu)(layers.Dense(32, activation=tf.nn.gelu)(y))
        x = layers.Add()([x, y])
    x = SequencePooling()(layers.LayerNormalization(epsilon=1e-5)(x))
    return keras.Model(inputs, layers.Dense(5)(x))


class Involution(layers.Layer):
    """A kernel for each pixel, made from the pixel, shared by all channels of a group."""

    def __init__(self, groups: int, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.groups, self.size = groups, size

    def build(self, input_shape: Any) -> None:
        _, height, width, channels = input_shape
        self.kernels = keras.Sequential(
            [
                *(layers.Conv2D(channels // 2, 1), layers.BatchNormalization(), layers.ReLU()),
                layers.Conv2D(self.size**2 * self.groups, 1),
            ]
        )
        taps = self.size**2
        self.kernel_reshape = layers.Reshape((height, width, taps, 1, self.groups))
        of_group = channels // self.groups
        self.patches_reshape = layers.Reshape((height, width, taps, of_group, self.groups))
        self.output_reshape = layers.Reshape((height, width, channels))

    def call(self, x: Any) -> Any:
        kernel = self.kernel_reshape(self.kernels(x))
        sizes = [1, self.size, self.size, 1]
        patches = tf.image.extract_patches(x, sizes, [1, 1, 1, 1], [1, 1, 1, 1], "SAME")
        product = tf.multiply(kernel, self.patches_reshape(patches))
        return self.output_reshape(tf.reduce_sum(product, axis=3))


def involution() -> Any:
    """Two of them."""
    inputs = keras.Input((16, 16, 4))
    x = layers.MaxPooling2D()(layers.ReLU()(Involution(1, 3)(inputs)))
    x = layers.Flatten()(layers.ReLU()(Involution(2, 3)(x)))
    return keras.Model(inputs, layers.Dense(5)(layers.Dense(16, activation="relu")(x)))


def shift_vit() -> Any:
    """ShiftViT: quarters of channels moved by a pixel in place of attention, scales of layers."""

    class Shift(layers.Layer):
        """Crops one side and pads the other."""

        def call(self, x: Any) -> Any:
            size, part = x.shape[1], x.shape[-1] // 8
            moved = []
            for index, (down, right) in enumerate(((1, 0), (-1, 0), (0, 1), (0, -1))):
                y = x[..., index * part : (index + 1) * part]
                y = tf.image.crop_to_bounding_box(
                    y, max(-down, 0), max(-right, 0), size - abs(down), size - abs(right)
                )
                padded = tf.image.pad_to_bounding_box(y, max(down, 0), max(right, 0), size, size)
                moved.append(padded)
            return tf.concat([*moved, x[..., 4 * part :]], axis=-1)

    class Scaled(layers.Layer):
        """A small learned factor for each channel."""

        def build(self, input_shape: Any) -> None:
            small = keras.initializers.Constant(0.1)
            self.factor = self.add_weight("factor", input_shape[-1:], initializer=small)

        def call(self, x: Any) -> Any:
            return x * self.factor

    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 4, 4)(inputs)
    for _ in range(2):
        x = Shift()(x)
        y = layers.Conv2D(32, 1, activation="gelu")(layers.LayerNormalization(epsilon=1e-5)(x))
        x = layers.Add()([x, Scaled()(layers.Conv2D(16, 1)(y))])
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


class MaskedConvolution(layers.Conv2D):
    """PixelCNN: a kernel times a mask that hides later pixels."""

    def __init__(self, filters: int, kernel_size: Any, sees_itself: bool, **kwargs: Any) -> None:
        super().__init__(filters, kernel_size, padding="same", **kwargs)
        self.sees_itself = sees_itself

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        mask = np.zeros(self.kernel.shape, np.float32)
        middle = self.kernel.shape[0] // 2
        mask[:middle] = 1.0
        mask[middle, : middle + self.sees_itself] = 1.0
        self.mask = tf.constant(mask)

    def call(self, x: Any) -> Any:
        x = tf.nn.conv2d(x, self.kernel * self.mask, self.strides, "SAME")
        return self.activation(tf.nn.bias_add(x, self.bias))


def pixel_cnn() -> Any:
    """Masked convolutions in residual blocks."""
    inputs = keras.Input((14, 14, 1))
    x = MaskedConvolution(16, 7, False, activation="relu")(inputs)
    for _ in range(2):
        y = layers.Conv2D(8, 1, activation="relu")(x)
        y = MaskedConvolution(8, 3, True, activation="relu")(y)
        x = layers.Add()([x, layers.Conv2D(16, 1, activation="relu")(y)])
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))


def conditioned() -> Any:
    """FiLM: factors and offsets of channels from a second input."""
    inputs, condition = keras.Input((16, 16, 3)), keras.Input((6,))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(2):
        y = layers.BatchNormalization(center=False, scale=False)(layers.Conv2D(16, 3)(x))
        gamma, beta = tf.split(layers.Dense(32)(condition), 2, axis=-1)
        y = (1.0 + gamma[:, None, None, :]) * y + beta[:, tf.newaxis, tf.newaxis]
        x = layers.ReLU()(y)
    return keras.Model([inputs, condition], layers.Dense(4)(layers.GlobalMaxPooling2D()(x)))


def squash(x: Any) -> Any:
    """Shortens vectors to less than 1."""
    square = tf.reduce_sum(tf.square(x), axis=-1, keepdims=True)
    return square / (1.0 + square) / tf.sqrt(square + keras.backend.epsilon()) * x


class Capsules(layers.Layer):
    """Votes of capsules, routed by agreement."""

    def __init__(self, count: int, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count, self.units = count, units

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight(
            "kernel", (self.count, input_shape[1], self.units, input_shape[2])
        )

    def call(self, x: Any) -> Any:
        votes = tf.einsum("cids,bis->bcid", self.kernel, x)
        scores = tf.reduce_sum(votes, axis=-1) * 0.0
        for turn in range(2):
            coupling = tf.nn.softmax(scores, axis=1)
            output = squash(tf.einsum("bci,bcid->bcd", coupling, votes))
            if turn == 0:
                scores += tf.einsum("bcd,bcid->bci", output, votes)
        return output


def capsules() -> Any:
    """CapsNet; lengths are the classes."""
    inputs = keras.Input((16, 16, 1))
    x = layers.Conv2D(16, 5, activation="relu")(inputs)
    x = layers.Reshape((-1, 4))(layers.Conv2D(8, 5, strides=4)(x))
    x = Capsules(3, 6)(layers.Lambda(squash)(x))
    return keras.Model(inputs, layers.Lambda(lambda t: tf.sqrt(tf.reduce_sum(t**2, -1)))(x))


def deep_lab() -> Any:
    """Dilated pyramid with pooling of the whole picture, features of an early stage, upsampled."""
    inputs = keras.Input((32, 32, 3))

    def block(x: Any, filters: int = 16, size: int = 3, dilation: int = 1) -> Any:
        x = layers.Conv2D(filters, size, dilation_rate=dilation, padding="same", use_bias=False)(x)
        return tf.nn.relu(layers.BatchNormalization()(x))

    early = layers.MaxPooling2D()(block(inputs))
    x = layers.MaxPooling2D(2)(block(early))
    height, width = x.shape[-3:-1]
    pooled = block(layers.AveragePooling2D((height, width))(x), size=1)
    pooled = layers.UpSampling2D((height, width), interpolation="bilinear")(pooled)
    x = layers.Concatenate()([pooled, block(x, size=1), *(block(x, dilation=d) for d in (2, 3))])
    x = layers.UpSampling2D(2, interpolation="bilinear")(block(x, size=1))
    x = layers.Concatenate()([x, block(early, 8, 1)])
    x = layers.UpSampling2D(2, interpolation="bilinear")(block(x))
    return keras.Model(inputs, layers.Conv2D(4, 1, padding="same")(x))


TOKENS: tuple[Callable[[], Any], ...] = (
    *(mlp_mixer, conv_mixer, g_mlp, perceiver, swin, compact_transformer, involution, shift_vit),
    *(pixel_cnn, conditioned, capsules, deep_lab),
)
