"""Detectors and what they decode, written by hand: anchors, distributions, peaks, queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.wild.blocks import conv
from keras_qat.keras2.backend import keras

__all__ = ["DETECTORS"]

layers: Any = keras.layers


def anchors(size: int, count: int) -> np.ndarray:
    """Centers and sizes of anchor boxes, [size * size * count, 4]."""
    steps = (np.arange(size) + 0.5) / size
    centers = np.stack(np.meshgrid(steps, steps), -1).reshape(-1, 1, 2).repeat(count, 1)
    sizes = np.linspace(0.2, 0.6, count)[:, None].repeat(2, 1)[None].repeat(size * size, 0)
    return np.concatenate([centers, sizes], -1).reshape(-1, 4).astype(np.float32)


class DecodeBoxes(layers.Layer):
    """Boxes of SSD: offsets of anchors, scaled by variances, as corners."""

    def __init__(self, size: int, count: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size, self.count = size, count
        self.anchors = anchors(size, count)

    def call(self, offsets: Any) -> Any:
        centers = self.anchors[:, :2] + offsets[..., :2] * 0.1 * self.anchors[:, 2:]
        sizes = self.anchors[:, 2:] * tf.exp(tf.minimum(offsets[..., 2:] * 0.2, 4.0))
        return tf.concat([centers - sizes / 2.0, centers + sizes / 2.0], axis=-1)


def single_shot() -> Any:
    """SSD: two scales, boxes decoded by anchors, class scores."""
    inputs = keras.Input((64, 64, 3))
    x = conv(conv(conv(inputs, 8, strides=2), 16, strides=2), 16, strides=2)
    boxes, scores = [], []
    for size in (8, 4):
        result = layers.Reshape((size * size * 2, 4))(layers.Conv2D(8, 3, padding="same")(x))
        boxes.append(DecodeBoxes(size, 2)(result))
        result = layers.Reshape((size * size * 2, 5))(layers.Conv2D(10, 3, padding="same")(x))
        scores.append(layers.Softmax()(result))
        x = conv(x, 16, strides=2)
    return keras.Model(inputs, [layers.Concatenate(1)(item) for item in (boxes, scores)])


class Integral(layers.Layer):
    """Distribution focal loss: the expected distance of softmax over 16 bins."""

    def __init__(self, bins: int = 16, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bins = bins

    def call(self, x: Any) -> Any:
        x = tf.nn.softmax(tf.reshape(x, [-1, x.shape[1], 4, self.bins]))
        return tf.linalg.matvec(x, tf.range(self.bins, dtype=tf.float32))


def yolo_v8() -> Any:
    """C2f blocks, distances by DFL, boxes around the points of a grid."""
    inputs = keras.Input((64, 64, 3))
    x = conv(conv(inputs, 8, strides=2, activation=tf.nn.silu), 16, strides=2)
    left, right = layers.Lambda(lambda t: tf.split(t, 2, axis=-1))(x)
    x = layers.Concatenate()([left, right, conv(right, 8, activation=tf.nn.silu)])
    x = conv(x, 32, strides=2, activation=tf.nn.silu)
    distances = Integral()(layers.Reshape((64, 64))(layers.Conv2D(64, 1)(x)))
    scores = layers.Reshape((64, 4))(layers.Conv2D(4, 1, activation="sigmoid")(x))
    points = anchors(8, 1)[:, :2] * 8

    def boxes(t: Any) -> Any:
        low, high = tf.split(t, 2, axis=-1)
        return tf.concat([points - low, points + high], -1) * 8.0

    return keras.Model(inputs, layers.Concatenate()([layers.Lambda(boxes)(distances), scores]))


def yolo_v3() -> Any:
    """Heads decoded with a grid made by tf.range and tf.meshgrid, as the tutorials do."""
    inputs = keras.Input((64, 64, 3))
    x = conv(conv(conv(inputs, 8, strides=2), 16, strides=2), 16, strides=2)
    x = layers.Reshape((8, 8, 3, 9))(layers.Conv2D(27, 1)(x))

    def decode(t: Any) -> Any:
        xy, wh, confidence, classes = tf.split(t, (2, 2, 1, 4), axis=-1)
        grid = tf.stack(tf.meshgrid(tf.range(8), tf.range(8)), axis=-1)[:, :, None]
        xy = (tf.sigmoid(xy) + tf.cast(grid, tf.float32)) / 8.0
        wh = tf.exp(wh) * np.array([[0.1, 0.1], [0.2, 0.3], [0.5, 0.4]], np.float32)
        corners = tf.concat([xy - wh / 2, xy + wh / 2], axis=-1)
        return tf.concat([corners, tf.sigmoid(confidence), tf.sigmoid(classes)], -1)

    return keras.Model(inputs, layers.Lambda(decode)(x))


def center_peaks() -> Any:
    """CenterNet: a heat map that keeps only its peaks, by an equality and a cast."""
    inputs = keras.Input((64, 64, 3))
    x = conv(conv(inputs, 16, strides=2), 16, strides=2)
    heat = layers.Conv2D(4, 1, activation="sigmoid")(x)

    def peaks(t: Any) -> Any:
        highest = tf.nn.max_pool2d(t, 3, 1, "SAME")
        return t * tf.cast(tf.equal(t, highest), tf.float32)

    return keras.Model(inputs, [layers.Lambda(peaks)(heat), layers.Conv2D(2, 1)(x)])


class Fusion(layers.Layer):
    """Weighted fusion of BiFPN: weights are positive and divided by their sum."""

    def build(self, input_shape: Any) -> None:
        self.w = self.add_weight("w", (len(input_shape),), initializer="ones")

    def call(self, inputs: Any) -> Any:
        w = tf.nn.relu(self.w)
        x = tf.reduce_sum([w[i] * inputs[i] for i in range(len(inputs))], axis=0)
        return x / (tf.reduce_sum(w) + 1e-4)


def bifpn() -> Any:
    """Two levels, fused up and down."""
    inputs = keras.Input((64, 64, 3))
    high = conv(conv(inputs, 16, strides=2), 16, strides=2)
    low = conv(high, 16, strides=2)
    for _ in range(2):
        up = Fusion()([high, layers.UpSampling2D()(low)])
        up = layers.SeparableConv2D(16, 3, padding="same")(layers.Activation("swish")(up))
        down = layers.MaxPooling2D(3, 2, padding="same")(up)
        low = layers.SeparableConv2D(16, 3, padding="same")(Fusion()([low, down]))
        high = up
    return keras.Model(inputs, [layers.Conv2D(9, 3, padding="same")(x) for x in (high, low)])


class Queries(layers.Layer):
    """Learned queries for each image of a batch."""

    def build(self, input_shape: Any) -> None:
        self.queries = self.add_weight("queries", (8, 32))

    def call(self, x: Any) -> Any:
        return tf.tile(self.queries[None], [tf.shape(x)[0], 1, 1])


def sine_positions(size: int, units: int) -> np.ndarray:
    """Positions of pixels as sines and cosines, [size * size, units]."""
    angle = np.arange(size)[:, None] / 100 ** (np.arange(units // 4) * 4 / units)
    waves = np.concatenate([np.sin(angle), np.cos(angle)], -1)
    rows, columns = np.repeat(waves, size, 0), np.tile(waves, (size, 1))
    return np.concatenate([rows, columns], -1).astype(np.float32)


def detr() -> Any:
    """A transformer with an encoder, queries and a decoder."""
    inputs = keras.Input((64, 64, 3))
    x = conv(conv(conv(inputs, 8, strides=2), 16, strides=2), 32, strides=2)
    memory = layers.Reshape((64, 32))(x)
    positions = sine_positions(8, 32)
    keyed = layers.Lambda(lambda t: t + positions)(memory)
    memory = layers.LayerNormalization()(
        memory + layers.MultiHeadAttention(2, 16)(keyed, memory, keyed)
    )
    queries = Queries()(memory)
    x = layers.LayerNormalization()(queries + layers.MultiHeadAttention(2, 16)(queries, memory))
    x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, "relu")(x)))
    boxes = layers.Dense(4, "sigmoid")(layers.Dense(32, "relu")(x))
    return keras.Model(inputs, [layers.Dense(5)(x), boxes])


def fcos() -> Any:
    """Distances by exp of a learned scale, center-ness times classes under a root."""

    class Scale(layers.Layer):
        """A learned factor."""

        def build(self, input_shape: Any) -> None:
            self.scale = self.add_weight("scale", (), initializer="ones")

        def call(self, x: Any) -> Any:
            return tf.exp(x * self.scale)

    inputs = keras.Input((64, 64, 3))
    x = conv(conv(inputs, 16, strides=2), 16, strides=2)
    distances = Scale()(layers.Conv2D(4, 3, padding="same")(x))
    classes = layers.Conv2D(4, 3, padding="same", activation="sigmoid")(x)
    centered = layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x)
    scores = layers.Lambda(lambda t: tf.sqrt(t[0] * t[1]))([classes, centered])
    return keras.Model(inputs, [distances, scores])


def best_boxes() -> Any:
    """The best 10 boxes, by tf.math.top_k and tf.gather."""
    inputs = keras.Input((64, 64, 3))
    x = conv(conv(conv(inputs, 8, strides=2), 16, strides=2), 16, strides=2)
    boxes = layers.Reshape((64, 4))(layers.Conv2D(4, 1)(x))
    scores = layers.Reshape((64,))(layers.Conv2D(1, 1, activation="sigmoid")(x))

    def best(t: Any) -> Any:
        boxes, scores = t
        scores, indices = tf.math.top_k(scores, 10)
        return tf.gather(boxes, indices, batch_dims=1), scores

    return keras.Model(inputs, layers.Lambda(best)([boxes, scores]))


def soft_argmax() -> Any:
    """Key points as expected coordinates of a softmax over pixels."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(5, 1)(conv(conv(inputs, 16, strides=2), 16))

    def points(t: Any) -> Any:
        t = tf.nn.softmax(tf.reshape(t, [-1, 256, 5]), axis=1)
        steps = tf.linspace(0.0, 1.0, 16)
        grid = tf.reshape(tf.stack(tf.meshgrid(steps, steps), -1), [1, 256, 1, 2])
        return tf.reduce_sum(t[..., None] * grid, axis=1)

    return keras.Model(inputs, layers.Lambda(points)(x))


def face_mesh() -> Any:
    """BlazeFace blocks: channels padded with zeros, land marks as one vector."""
    inputs = keras.Input((64, 64, 3))
    x = conv(inputs, 16, 5, 2)
    for filters in (16, 24, 32):
        y = layers.DepthwiseConv2D(3, 2, padding="same")(x)
        y = layers.BatchNormalization()(layers.Conv2D(filters, 1)(y))
        x = layers.MaxPooling2D(2)(x)
        missing = filters - x.shape[-1]
        if missing:
            zeros = layers.Lambda(lambda t, n=missing: tf.zeros_like(t[..., :n]))(x)
            x = layers.Concatenate()([x, zeros])
        x = layers.PReLU(shared_axes=[1, 2])(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(30)(layers.Flatten()(x)))


DETECTORS: tuple[Callable[[], Any], ...] = (
    *(single_shot, yolo_v8, yolo_v3, center_peaks, bifpn, detr, fcos, best_boxes),
    *(soft_argmax, face_mesh),
)
