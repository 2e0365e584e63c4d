"""Transformers and attention written by hand, with the masks, norms and positions people write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras

__all__ = ["TRANSFORMERS"]

layers: Any = keras.layers


class RMSNorm(layers.Layer):
    """Of Llama."""

    def build(self, input_shape: Any) -> None:
        self.gain = self.add_weight("gain", input_shape[-1:], initializer="ones")

    def call(self, x: Any) -> Any:
        square = tf.reduce_mean(tf.square(x), axis=-1, keepdims=True)
        return x * tf.math.rsqrt(square + 1e-6) * self.gain


class OwnLayerNorm(layers.Layer):
    """Layer normalization by mean and standard deviation, as in The Annotated Transformer."""

    def build(self, input_shape: Any) -> None:
        self.gamma = self.add_weight("gamma", input_shape[-1:], initializer="ones")
        self.beta = self.add_weight("beta", input_shape[-1:], initializer="zeros")

    def call(self, x: Any) -> Any:
        mean = tf.reduce_mean(x, -1, keepdims=True)
        deviation = tf.math.reduce_std(x, -1, keepdims=True)
        return self.gamma * (x - mean) / (deviation + 1e-6) + self.beta


def scaled_dot_product(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """That of TensorFlow's tutorial."""
    scores = tf.matmul(q, k, transpose_b=True)
    scores = scores / tf.math.sqrt(tf.cast(tf.shape(k)[-1], tf.float32))
    if mask is not None:
        scores += mask * -1e9
    return tf.matmul(tf.nn.softmax(scores, axis=-1), v)


class TutorialAttention(layers.Layer):
    """Multi-head attention of TensorFlow's tutorial."""

    def __init__(self, units: int, heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units, self.heads = units, heads
        self.wq, self.wk, self.wv = (layers.Dense(units) for _ in range(3))
        self.dense = layers.Dense(units)

    def split(self, x: Any, batch: Any) -> Any:
        x = tf.reshape(x, (batch, -1, self.heads, self.units // self.heads))
        return tf.transpose(x, perm=[0, 2, 1, 3])

    def call(self, v: Any, k: Any, q: Any, mask: Any = None) -> Any:
        batch = tf.shape(q)[0]
        q, k, v = (
            self.split(dense(x), batch) for dense, x in ((self.wq, q), (self.wk, k), (self.wv, v))
        )
        x = tf.transpose(scaled_dot_product(q, k, v, mask), perm=[0, 2, 1, 3])
        return self.dense(tf.reshape(x, (batch, -1, self.units)))


def sine_positions(length: int, units: int) -> np.ndarray:
    """Sines and cosines, [1, length, units]."""
    angle = np.arange(length)[:, None] / 10000 ** (np.arange(units) // 2 * 2 / units)
    return np.where(np.arange(units) % 2, np.cos(angle), np.sin(angle))[None].astype(np.float32)


def padding_mask(ids: Any) -> Any:
    """1 where there is no word."""
    return tf.cast(tf.math.equal(ids, 0), tf.float32)[:, tf.newaxis, tf.newaxis, :]


def tutorial_transformer() -> Any:
    """Encoder and decoder of TensorFlow's tutorial, with both masks."""
    source, target = (keras.Input((12,), dtype="int32", name=name) for name in ("source", "target"))

    def embed(ids: Any) -> Any:
        x = layers.Embedding(40, 32)(ids) * tf.math.sqrt(tf.cast(32, tf.float32))
        return x + sine_positions(12, 32)

    mask = layers.Lambda(padding_mask)(source)
    x = embed(source)
    x = layers.LayerNormalization()(x + TutorialAttention(32, 2)(x, x, x, mask))
    memory = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, "relu")(x)))
    ahead = layers.Lambda(
        lambda t: tf.maximum(1.0 - tf.linalg.band_part(tf.ones((12, 12)), -1, 0), padding_mask(t))
    )(target)
    x = embed(target)
    x = layers.LayerNormalization()(x + TutorialAttention(32, 2)(x, x, x, ahead))
    x = layers.LayerNormalization()(x + TutorialAttention(32, 2)(memory, memory, x, mask))
    return keras.Model([source, target], layers.Dense(40)(x))


class CausalAttention(layers.Layer):
    """miniGPT: one product for q, k and v, a mask by tf.where."""

    def __init__(self, units: int, heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.heads, self.qkv, self.out = heads, layers.Dense(3 * units), layers.Dense(units)

    def call(self, x: Any) -> Any:
        _, length, units = x.shape
        q, k, v = tf.split(self.qkv(x), 3, axis=-1)
        q, k, v = (
            tf.transpose(tf.reshape(t, [-1, length, self.heads, units // self.heads]), [0, 2, 1, 3])
            for t in (q, k, v)
        )
        scores = tf.matmul(q, k, transpose_b=True) * (units // self.heads) ** -0.5
        mask = tf.linalg.band_part(tf.ones((length, length), tf.bool), -1, 0)
        scores = tf.where(mask, scores, tf.constant(-1e9))
        x = tf.transpose(tf.matmul(tf.nn.softmax(scores), v), [0, 2, 1, 3])
        return self.out(tf.reshape(x, [-1, length, units]))


class TiedHead(layers.Layer):
    """Logits by the transposed table of an embedding."""

    def __init__(self, embedding: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        return tf.matmul(x, self.embedding.embeddings, transpose_b=True)


def mini_gpt() -> Any:
    """A decoder with tied embeddings."""
    ids = keras.Input((16,), dtype="int32")
    words = layers.Embedding(50, 32)
    x = words(ids) + layers.Embedding(16, 32)(tf.range(16))
    for _ in range(2):
        x = x + CausalAttention(32, 2)(layers.LayerNormalization()(x))
        y = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(32)(y)
    return keras.Model(ids, TiedHead(words)(layers.LayerNormalization()(x)))


class Rotary(layers.Layer):
    """Rotary positions: halves turned by angles that tf.cos and tf.sin compute."""

    def call(self, x: Any) -> Any:
        length, units = x.shape[-2:]
        frequencies = 1.0 / 10000 ** (tf.range(0, units, 2, dtype=tf.float32) / units)
        angles = tf.range(length, dtype=tf.float32)[:, None] * frequencies[None]
        sines = tf.concat([tf.sin(angles)] * 2, -1)
        cosines = tf.concat([tf.cos(angles)] * 2, -1)
        first, second = tf.split(x, 2, axis=-1)
        return x * cosines + tf.concat([-second, first], -1) * sines


def llama() -> Any:
    """RMSNorm, rotary positions, SwiGLU."""
    ids = keras.Input((16,), dtype="int32")
    x = layers.Embedding(50, 32)(ids)
    for _ in range(2):
        y = RMSNorm()(x)
        q, k, v = (layers.Dense(32, use_bias=False)(y) for _ in range(3))
        q, k = (Rotary()(t) for t in (q, k))
        x = x + layers.Attention(use_scale=True)([q, v, k], use_causal_mask=True)
        y = RMSNorm()(x)
        y = layers.Dense(64, activation=tf.nn.silu)(y) * layers.Dense(64)(y)
        x = x + layers.Dense(32)(y)
    return keras.Model(ids, layers.Dense(50)(RMSNorm()(x)))


def annotated() -> Any:
    """The Annotated Transformer's own normalization."""
    ids = keras.Input((16,), dtype="int32")
    x = layers.Embedding(50, 32)(ids) * 32**0.5 + sine_positions(16, 32)
    y = OwnLayerNorm()(x)
    x = x + TutorialAttention(32, 2)(y, y, y)
    x = x + layers.Dense(32)(layers.Dense(64, "relu")(OwnLayerNorm()(x)))
    return keras.Model(ids, layers.Dense(50)(x))


def masked_bert() -> Any:
    """BERT with an attention mask among its inputs, a pooler, segment embeddings."""
    names = ("ids", "mask", "types")
    ids, mask, types = inputs = [keras.Input((16,), dtype="int32", name=n) for n in names]
    x = layers.Embedding(60, 32)(ids) + layers.Embedding(2 + 8, 32)(types)
    x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Embedding(16, 32)(tf.range(16)))
    extended = (1.0 - tf.cast(mask[:, None, None, :], tf.float32)) * -10000.0
    for _ in range(2):
        heads = [layers.Reshape((16, 2, 16))(layers.Dense(32)(x)) for _ in range(3)]
        q, k, v = (tf.transpose(t, [0, 2, 1, 3]) for t in heads)
        scores = tf.matmul(q, k, transpose_b=True) / 4.0 + extended
        y = tf.matmul(tf.nn.softmax(scores, -1), v)
        y = layers.Reshape((16, 32))(tf.transpose(y, [0, 2, 1, 3]))
        x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Dense(32)(y))
        y = layers.Dense(32)(layers.Dense(64, activation="gelu")(x))
        x = layers.LayerNormalization(epsilon=1e-12)(x + y)
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(32, "tanh")(x[:, 0])))


def sentence_embedding() -> Any:
    """Means over words that are there, divided by how many, then of length 1."""
    ids = keras.Input((16,), dtype="int32")
    x = layers.Dense(32, "relu")(layers.Embedding(50, 32)(ids))

    def pooled(t: Any) -> Any:
        x, ids = t
        mask = tf.cast(tf.not_equal(ids, 0), tf.float32)[..., None]
        total = tf.reduce_sum(x * mask, axis=1)
        mean = total / tf.maximum(tf.reduce_sum(mask, axis=1), 1e-9)
        return mean / tf.norm(mean, axis=-1, keepdims=True)

    return keras.Model(ids, layers.Lambda(pooled)([x, ids]))


class LinearAttention(layers.Layer):
    """elu + 1 as feature map, a division by the sum of keys."""

    def call(self, inputs: Any) -> Any:
        q, k, v = inputs
        q, k = (tf.nn.elu(t) + 1.0 for t in (q, k))
        context = tf.einsum("bnd,bne->bde", k, v)
        total = tf.einsum("bnd,bd->bn", q, tf.reduce_sum(k, axis=1))
        return tf.einsum("bnd,bde->bne", q, context) / total[..., None]


def linear_transformer() -> Any:
    """Attention without softmax."""
    inputs = keras.Input((32, 8))
    x = layers.Dense(32)(inputs)
    x = x + LinearAttention()([layers.Dense(32)(x) for _ in range(3)])
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


class ExternalAttention(layers.Layer):
    """Attention to two learned memories, normalized twice."""

    def build(self, input_shape: Any) -> None:
        self.keys = self.add_weight("keys", (input_shape[-1], 8))
        self.memory = self.add_weight("memory", (8, input_shape[-1]))

    def call(self, x: Any) -> Any:
        scores = tf.nn.softmax(tf.matmul(x, self.keys), axis=1)
        scores = scores / (1e-9 + tf.reduce_sum(scores, axis=-1, keepdims=True))
        return tf.matmul(scores, self.memory)


def external_attention() -> Any:
    """EANet of the Keras examples."""
    inputs = keras.Input((32, 16))
    x = layers.Dense(16)(inputs)
    for _ in range(2):
        x = x + ExternalAttention()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def fourier_net() -> Any:
    """FNet with the Fourier transform as two products with constants."""
    inputs = keras.Input((16, 32))
    turns = {n: 2 * np.pi * np.outer(np.arange(n), np.arange(n)) / n for n in (16, 32)}
    cosines, sines = (
        {n: f(t).astype("float32") for n, t in turns.items()} for f in (np.cos, np.sin)
    )

    def mix(x: Any) -> Any:
        real, imaginary = tf.matmul(x, cosines[32]), tf.matmul(x, sines[32])
        return tf.matmul(cosines[16], real) - tf.matmul(sines[16], imaginary)

    x = layers.LayerNormalization()(inputs + layers.Lambda(mix)(inputs))
    x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, "gelu")(x)))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


class TalkingPooling(layers.Layer):
    """Attention pooling: scores of a tanh, softmax along the steps, a weighted sum."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden, self.score = layers.Dense(units, "tanh"), layers.Dense(1)

    def call(self, x: Any) -> Any:
        weights = tf.nn.softmax(self.score(self.hidden(x)), axis=1)
        return tf.reduce_sum(weights * x, axis=1)


def attention_pooling() -> Any:
    """Hierarchical attention over words."""
    ids = keras.Input((20,), dtype="int32")
    x = layers.Conv1D(32, 3, padding="same", activation="relu")(layers.Embedding(50, 16)(ids))
    return keras.Model(ids, layers.Dense(3, "softmax")(TalkingPooling(16)(x)))


def switch() -> Any:
    """A mixture of experts: softmax gates, all experts, a sum weighted by gates."""
    inputs = keras.Input((16, 32))
    gates = layers.Dense(4, "softmax")(inputs)
    experts = [layers.Dense(32)(layers.Dense(32, "relu")(inputs)) for _ in range(4)]
    stacked = layers.Lambda(lambda t: tf.stack(t, axis=-1))(experts)
    x = layers.Lambda(lambda t: tf.reduce_sum(t[0] * t[1][:, :, None, :], -1))([stacked, gates])
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalMaxPooling1D()(x)))


TRANSFORMERS: tuple[Callable[[], Any], ...] = (
    *(tutorial_transformer, mini_gpt, llama, annotated, masked_bert, sentence_embedding),
    *(linear_transformer, external_attention, fourier_net, attention_pooling, switch),
)
