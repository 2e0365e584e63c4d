"""Graph networks, point clouds, tables and recommenders written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras

__all__ = ["GRAPHS_AND_TABLES"]

layers: Any = keras.layers


class GraphConvolution(layers.Layer):
    """A X W, normalized by degrees."""

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight("kernel", (input_shape[0][-1], 16))
        self.bias = self.add_weight("bias", (16,), initializer="zeros")

    def call(self, inputs: Any) -> Any:
        x, adjacency = inputs
        degree = tf.reduce_sum(adjacency, axis=-1, keepdims=True)
        x = tf.matmul(adjacency, tf.matmul(x, self.kernel)) / (degree + 1e-3)
        return tf.nn.relu(x + self.bias)


def graph_network() -> Any:
    """Dense adjacency among the inputs."""
    nodes, edges = keras.Input((10, 8)), keras.Input((10, 10))
    positive = layers.ReLU()(edges)
    x = GraphConvolution()([GraphConvolution()([nodes, positive]), positive])
    return keras.Model([nodes, edges], layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


class GraphAttention(layers.Layer):
    """GAT: leaky scores of pairs, hidden where there is no edge."""

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight("kernel", (input_shape[0][-1], 16))
        self.source = self.add_weight("source", (16, 1))
        self.target = self.add_weight("target", (16, 1))

    def call(self, inputs: Any) -> Any:
        x, adjacency = inputs
        h = tf.matmul(x, self.kernel)
        scores = tf.matmul(h, self.source) + tf.transpose(tf.matmul(h, self.target), [0, 2, 1])
        scores = tf.nn.leaky_relu(scores)
        scores = tf.where(adjacency > 0, scores, -9e15 * tf.ones_like(scores))
        return tf.nn.elu(tf.matmul(tf.nn.softmax(scores, axis=-1), h))


def graph_attention() -> Any:
    """Two layers of graph attention."""
    nodes, edges = keras.Input((10, 8)), keras.Input((10, 10))
    x = GraphAttention()([GraphAttention()([nodes, edges]), edges])
    return keras.Model([nodes, edges], layers.Dense(3)(x))


def fixed_graph() -> Any:
    """A skeleton's constant adjacency in products from the left, as in ST-GCN."""
    inputs = keras.Input((16, 5, 3))
    adjacency = (np.eye(5) + np.eye(5, k=1) + np.eye(5, k=-1)).astype(np.float32) / 3
    x = inputs
    for _ in range(2):
        x = layers.Conv2D(16, 1)(x)
        x = layers.Lambda(lambda t: tf.einsum("vw,btwc->btvc", adjacency, t))(x)
        x = layers.ReLU()(layers.Conv2D(16, (3, 1), padding="same")(x))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def neighbours() -> Any:
    """Neighbours gathered by indices among the inputs."""
    nodes = keras.Input((10, 8))
    indices = keras.Input((10, 3), dtype="int32")
    x = layers.Dense(16, "relu")(nodes)
    near = layers.Lambda(lambda t: tf.gather(t[0], t[1], batch_dims=1))([x, indices])
    near = layers.Lambda(lambda t: tf.reduce_max(t, axis=2))(near)
    return keras.Model([nodes, indices], layers.Dense(4)(layers.Concatenate()([x, near])))


def point_net() -> Any:
    """A learned 3 x 3 transform, shared layers, a maximum."""
    inputs = keras.Input((64, 3))
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(16, 1, activation="relu")(inputs))
    identity = keras.initializers.Constant(np.eye(3).flatten())
    x = layers.Dense(9, kernel_initializer="zeros", bias_initializer=identity)(x)
    x = layers.Dot(axes=(2, 1))([inputs, layers.Reshape((3, 3))(x)])
    x = layers.BatchNormalization()(layers.Conv1D(32, 1, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalMaxPooling1D()(x)))


def pair_distances(x: Any) -> Any:
    """Squared distances of all pairs of points."""
    squares = tf.reduce_sum(tf.square(x), axis=-1, keepdims=True)
    return squares - 2.0 * tf.matmul(x, x, transpose_b=True) + tf.transpose(squares, [0, 2, 1])


def edge_convolution() -> Any:
    """DGCNN: the nearest by top_k, their differences."""
    inputs = keras.Input((16, 3))

    def edges(x: Any) -> Any:
        _, near = tf.math.top_k(-pair_distances(x), 4)
        near = tf.gather(x, near, batch_dims=1)
        center = tf.tile(x[:, :, None], [1, 1, 4, 1])
        return tf.concat([center, near - center], axis=-1)

    x = layers.Conv2D(16, 1, activation="relu")(layers.Lambda(edges)(inputs))
    x = layers.Lambda(lambda t: tf.reduce_max(t, axis=2))(x)
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalMaxPooling1D()(x)))


def radial() -> Any:
    """Radial basis functions of learned centers."""

    class Radial(layers.Layer):
        """exp(-gamma |x - c|^2)."""

        def build(self, input_shape: Any) -> None:
            self.centers = self.add_weight("centers", (12, input_shape[-1]))

        def call(self, x: Any) -> Any:
            difference = tf.expand_dims(x, 1) - self.centers
            return tf.exp(-0.5 * tf.reduce_sum(tf.square(difference), axis=-1))

    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(3)(Radial()(inputs)))


def factorization_machine() -> Any:
    """Squares of sums less sums of squares of embeddings."""
    ids = keras.Input((6,), dtype="int32")
    embedded = layers.Embedding(40, 8)(ids)

    def pairs(t: Any) -> Any:
        square_of_sum = tf.square(tf.reduce_sum(t, axis=1))
        return 0.5 * tf.reduce_sum(square_of_sum - tf.reduce_sum(tf.square(t), 1), 1, keepdims=True)

    first = layers.Lambda(lambda t: tf.reduce_sum(t, axis=1))(layers.Embedding(40, 1)(ids))
    deep = layers.Dense(1)(layers.Dense(16, "relu")(layers.Flatten()(embedded)))
    total = layers.Add()([first, layers.Lambda(pairs)(embedded), deep])
    return keras.Model(ids, layers.Activation("sigmoid")(total))


def two_towers() -> Any:
    """Users and items of length 1, their product by a temperature."""
    user, item = (keras.Input((12,), name=name) for name in ("user", "item"))

    def tower(x: Any) -> Any:
        x = layers.Dense(8)(layers.Dense(16, "relu")(x))
        return layers.Lambda(lambda t: tf.linalg.l2_normalize(t, -1))(x)

    score = layers.Lambda(lambda t: tf.reduce_sum(t[0] * t[1], -1, keepdims=True) / 0.1)(
        [tower(user), tower(item)]
    )
    return keras.Model([user, item], score)


def mixture_density() -> Any:
    """Means, deviations by softplus, weights by softmax; scaled logits clipped."""
    inputs = keras.Input((8,))
    x = layers.Dense(16, "tanh")(inputs)
    mean = layers.Dense(3)(x)
    deviation = layers.Lambda(lambda t: tf.math.softplus(t) + 1e-3)(layers.Dense(3)(x))
    logits = layers.Lambda(lambda t: tf.clip_by_value(t, -5.0, 5.0))(layers.Dense(3)(x))
    return keras.Model(inputs, [mean, deviation, layers.Softmax()(logits)])


def dueling() -> Any:
    """Q values: a value and advantages less their mean."""
    inputs = keras.Input((8,))
    x = layers.Dense(32, "relu")(inputs)
    value, advantage = layers.Dense(1)(x), layers.Dense(4)(x)
    q = value + (advantage - tf.reduce_mean(advantage, axis=1, keepdims=True))
    return keras.Model(inputs, q)


def policy() -> Any:
    """Actions hidden by a mask among the inputs, and a squashed Gaussian."""
    state, legal = keras.Input((8,)), keras.Input((4,))
    x = layers.Dense(32, "relu")(state)
    logits = layers.Dense(4)(x) + (1.0 - legal) * -1e9
    mean = layers.Lambda(lambda t: tf.tanh(t) * 2.0)(layers.Dense(2)(x))
    deviation = layers.Lambda(lambda t: tf.exp(tf.clip_by_value(t, -5.0, 2.0)))(layers.Dense(2)(x))
    return keras.Model([state, legal], [layers.Softmax()(logits), mean, deviation])


class Sparsemax(layers.Layer):
    """Scores sorted and summed up, as TabNet chooses its features."""

    def call(self, x: Any) -> Any:
        ordered = tf.sort(x, axis=-1, direction="DESCENDING")
        sums = tf.cumsum(ordered, axis=-1)
        ranks = tf.range(1, x.shape[-1] + 1, dtype=tf.float32)
        inside = tf.cast(1.0 + ranks * ordered > sums, tf.float32)
        count = tf.reduce_sum(inside, axis=-1, keepdims=True)
        top = tf.reduce_sum(inside * ordered, axis=-1, keepdims=True)
        return tf.nn.relu(x - (top - 1.0) / count)


def tab_net() -> Any:
    """Two steps of chosen features, gated blocks."""
    inputs = keras.Input((12,))
    x = layers.BatchNormalization()(inputs)
    prior, total = tf.ones_like(x), 0.0
    for _ in range(2):
        mask = Sparsemax()(layers.Dense(12)(x) * prior)
        prior = prior * (1.3 - mask)
        y, gate = tf.split(layers.Dense(16)(mask * x), 2, axis=-1)
        total = total + tf.nn.relu(y * tf.sigmoid(gate))
    return keras.Model(inputs, layers.Dense(3)(total))


def wide_and_deep() -> Any:
    """Numbers that are missing, replaced by tf.where, and flags that say so."""
    inputs = keras.Input((10,))

    def filled(t: Any) -> Any:
        missing = tf.equal(t, -1.0)
        return tf.concat([tf.where(missing, tf.zeros_like(t), t), tf.cast(missing, t.dtype)], -1)

    x = layers.Lambda(filled)(inputs)
    deep = layers.Dense(8, "relu")(layers.Dense(16, "relu")(x))
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([x, deep])))


GRAPHS_AND_TABLES: tuple[Callable[[], Any], ...] = (
    *(graph_network, graph_attention, fixed_graph, neighbours, point_net, edge_convolution),
    *(radial, factorization_machine, two_towers, mixture_density, dueling, policy, tab_net),
    *(wide_and_deep,),
)
