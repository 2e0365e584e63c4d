"""More networks written by hand: recommenders, transformers, subclassed models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras

__all__ = ["TABLES_AND_TEXTS"]

layers: Any = keras.layers


def recommender() -> Any:
    """Two towers of embeddings and their product, and layers on top."""
    ids = [keras.Input((1,), dtype="int32", name=name) for name in ("user", "item")]
    result = [layers.Flatten()(layers.Embedding(50, 16)(item)) for item in ids]
    x = layers.Concatenate()([*result, layers.Dot(1)(result), layers.Multiply()(result)])
    for units in (32, 16):
        x = layers.Dropout(0.1)(layers.Dense(units, activation="relu")(x))
    return keras.Model(ids, layers.Dense(1, activation="sigmoid")(x))


class Cross(layers.Layer):
    """Of deep and cross networks: x0 * (x W + b) + x."""

    def build(self, input_shape: Any) -> None:
        size = input_shape[0][-1]
        self.kernel = self.add_weight("kernel", (size, size))
        self.bias = self.add_weight("bias", (size,))

    def call(self, inputs: Any) -> Any:
        x0, x = inputs
        return x0 * (tf.matmul(x, self.kernel) + self.bias) + x


def deep_and_cross() -> Any:
    """DCN-V2."""
    x0 = inputs = keras.Input((24,))
    x = x0
    for _ in range(3):
        x = Cross()([x0, x])
    deep = layers.Dense(16, activation="relu")(x0)
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([x, deep])))


class Patches(layers.Layer):
    """Patches of an image, as the Keras example makes them."""

    def __init__(self, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = size

    def call(self, images: Any) -> Any:
        sizes = [1, self.size, self.size, 1]
        result = tf.image.extract_patches(images, sizes, sizes, [1, 1, 1, 1], "VALID")
        return tf.reshape(result, [tf.shape(images)[0], -1, result.shape[-1]])


class PatchEncoder(layers.Layer):
    """A projection and an embedding of positions."""

    def __init__(self, count: int, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count, self.projection = count, layers.Dense(units)
        self.positions = layers.Embedding(count, units)

    def call(self, patches: Any) -> Any:
        return self.projection(patches) + self.positions(tf.range(self.count))


def vision_transformer() -> Any:
    """That of the Keras examples."""
    inputs = keras.Input((32, 32, 3))
    x = PatchEncoder(16, 32)(Patches(8)(inputs))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 16)(y, y)])
        y = layers.Dense(64, activation=tf.nn.gelu)(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(32)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(x))


class TransformerBlock(layers.Layer):
    """That of the Keras example on text."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, units)
        self.dense = keras.Sequential([layers.Dense(64, activation="relu"), layers.Dense(units)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.drops = [layers.Dropout(0.1) for _ in range(2)]

    def call(self, x: Any, training: Any = None) -> Any:
        y = self.drops[0](self.attention(x, x), training=training)
        x = self.norms[0](x + y)
        return self.norms[1](x + self.drops[1](self.dense(x), training=training))


class TokenAndPosition(layers.Layer):
    """Embeddings of both."""

    def __init__(self, length: int, words: int, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(words, units)
        self.positions, self.length = layers.Embedding(length, units), length

    def call(self, x: Any) -> Any:
        return self.tokens(x) + self.positions(tf.range(self.length))


def text_transformer() -> Any:
    """Text classification with a transformer, of the Keras examples."""
    inputs = keras.Input((20,), dtype="int32")
    x = TransformerBlock(32)(TokenAndPosition(20, 100, 32)(inputs))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, layers.Dense(2, activation="softmax")(x))


class Autoencoder(keras.Model):
    """A subclassed model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(32, activation="relu"), layers.Dense(8)])
        self.decoder = keras.Sequential([layers.Dense(32, activation="relu"), layers.Dense(64)])

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


def autoencoder() -> Any:
    """A subclassed model that was called on data."""
    model = Autoencoder()
    model(tf.zeros([1, 64]))
    return model


class SubclassedResNet(keras.Model):
    """A subclassed model with blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = layers.Conv2D(8, 3, padding="same", use_bias=False)
        self.norm = layers.BatchNormalization()
        self.blocks = [BasicBlock(8), BasicBlock(16, 2)]
        self.pool, self.head = layers.GlobalAveragePooling2D(), layers.Dense(10)

    def call(self, x: Any, training: Any = None) -> Any:
        x = tf.nn.relu(self.norm(self.stem(x), training=training))
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(self.pool(x))


class BasicBlock(layers.Layer):
    """Of a ResNet."""

    def __init__(self, filters: int, strides: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conv1 = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)
        self.conv2 = layers.Conv2D(filters, 3, padding="same", use_bias=False)
        self.norms = [layers.BatchNormalization() for _ in range(2)]
        self.shortcut = layers.Conv2D(filters, 1, strides) if strides > 1 else None

    def call(self, x: Any, training: Any = None) -> Any:
        y = tf.nn.relu(self.norms[0](self.conv1(x), training=training))
        y = self.norms[1](self.conv2(y), training=training)
        return tf.nn.relu(y + (x if self.shortcut is None else self.shortcut(x)))


def subclassed_resnet() -> Any:
    """A subclassed model that was called on data."""
    model = SubclassedResNet()
    model(tf.zeros([1, 32, 32, 3]))
    return model


TABLES_AND_TEXTS: tuple[Callable[[], Any], ...] = (
    *(recommender, deep_and_cross, vision_transformer, text_transformer),
    *(autoencoder, subclassed_resnet),
)
