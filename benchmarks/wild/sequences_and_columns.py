"""Sequences, columns of tables, sets and users, as the examples of Keras and others have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras

__all__ = ["SEQUENCES_AND_COLUMNS"]

layers: Any = keras.layers


def tab_transformer() -> Any:
    """Columns of categories as tokens, numbers normalized beside them."""
    categories = [keras.Input((1,), dtype="int32") for _ in range(4)]
    numbers = keras.Input((5,))
    x = tf.stack([layers.Embedding(10, 8)(column)[:, 0] for column in categories], axis=1)
    x = x + layers.Embedding(4, 8)(tf.range(start=0, limit=4, delta=1))
    for _ in range(2):
        y = layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x)
        x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([y, x]))
        y = layers.Dense(8)(layers.Dense(16, activation=keras.activations.gelu)(x))
        x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([y, x]))
    y = layers.LayerNormalization(epsilon=1e-6)(numbers)
    x = layers.Concatenate()([layers.Flatten()(x), y])
    for units in (16, 8):
        x = layers.Dense(units, activation=keras.activations.selu)(layers.BatchNormalization()(x))
    return keras.Model([*categories, numbers], layers.Dense(1, activation="sigmoid")(x))


class GatedResidual(layers.Layer):
    """ELU, a linear gate, a sum with the input, a norm."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.elu, self.linear = layers.Dense(units, activation="elu"), layers.Dense(units)
        self.value, self.gate = layers.Dense(units), layers.Dense(units, activation="sigmoid")
        self.norm, self.project = layers.LayerNormalization(), layers.Dense(units)

    def call(self, inputs: Any) -> Any:
        x = self.linear(self.elu(inputs))
        if inputs.shape[-1] != self.units:
            inputs = self.project(inputs)
        return self.norm(inputs + self.value(x) * self.gate(x))


def variable_selection() -> Any:
    """A gated residual network for each column, weighted by a softmax of all."""
    columns = [keras.Input((1,)) for _ in range(5)]
    encoded = [layers.Dense(8)(column) for column in columns]
    weights = layers.Dense(5, activation="softmax")(GatedResidual(8)(tf.concat(encoded, -1)))
    stacked = tf.stack([GatedResidual(8)(x) for x in encoded], axis=1)
    x = tf.squeeze(tf.matmul(tf.expand_dims(weights, 1), stacked), axis=1)
    return keras.Model(columns, layers.Dense(1, activation="sigmoid")(x))


class DecisionTree(layers.Layer):
    """A tree of soft decisions over a fixed choice of features; leaves hold class scores."""

    def __init__(self, depth: int, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.depth, self.seed = depth, seed

    def build(self, input_shape: Any) -> None:
        count = input_shape[-1]
        order = np.random.default_rng(self.seed).permutation(count)[: count // 2]
        self.used = tf.constant(np.eye(count, dtype=np.float32)[order])
        self.leaves = self.add_weight("leaves", (2**self.depth, 3), initializer="random_normal")
        self.decide = layers.Dense(2**self.depth, activation="sigmoid")

    def call(self, features: Any) -> Any:
        features = tf.matmul(features, self.used, transpose_b=True)
        decisions = tf.expand_dims(self.decide(features), axis=2)
        decisions = layers.concatenate([decisions, 1.0 - decisions], axis=2)
        reached, begin, end = tf.ones_like(decisions[:, :1, :1]), 1, 2
        for level in range(self.depth):
            reached = tf.reshape(reached, [-1, 2**level, 1])
            reached = tf.tile(reached, (1, 1, 2)) * decisions[:, begin:end, :]
            begin, end = end, end + 2 ** (level + 1)
        reached = tf.reshape(reached, [-1, 2**self.depth])
        return tf.matmul(reached, keras.activations.softmax(self.leaves))


def decision_forest() -> Any:
    """The mean of three trees."""
    inputs = keras.Input((10,))
    x = layers.BatchNormalization()(inputs)
    trees = [DecisionTree(3, seed)(x) for seed in range(3)]
    return keras.Model(inputs, layers.Average()(trees))


def deep_sets() -> Any:
    """Elements by one network, their sum by another; a mask says which are there."""
    points, present = keras.Input((12, 3)), keras.Input((12,))
    x = layers.TimeDistributed(layers.Dense(16, activation="relu"))(points)
    x = layers.TimeDistributed(layers.Dense(16, activation="tanh"))(x)
    x = layers.Multiply()([x, layers.Reshape((12, 1))(present)])
    count = layers.Lambda(lambda t: tf.reduce_sum(t, axis=1, keepdims=True) + 1.0)(present)
    total = layers.Lambda(lambda t: tf.reduce_sum(t, axis=1))(x)
    x = layers.Lambda(lambda t: t[0] / t[1])([total, count])
    return keras.Model([points, present], layers.Dense(1)(layers.Dense(16, "relu")(x)))


def recurrent_autoencoder() -> Any:
    """An LSTM to a vector, repeated, and back."""
    inputs = keras.Input((16, 4))
    x = layers.LSTM(8)(layers.LSTM(16, activation="tanh", return_sequences=True)(inputs))
    x = layers.LSTM(8, return_sequences=True)(layers.RepeatVector(16)(x))
    x = layers.LSTM(16, return_sequences=True)(x)
    return keras.Model(inputs, layers.TimeDistributed(layers.Dense(4))(x))


def attending_decoder() -> Any:
    """GRU to GRU by its state, with attention to the source (a decoder that is fed its target)."""
    source, target = (keras.Input((10,), dtype="int32", name=n) for n in ("source", "target"))
    encode = layers.GRU(16, return_sequences=True, return_state=True)
    memory, state = encode(layers.Embedding(30, 16)(source))
    x = layers.GRU(16, return_sequences=True)(layers.Embedding(30, 16)(target), initial_state=state)
    context = layers.Attention()([x, memory])
    x = layers.Dense(16, activation="tanh")(layers.Concatenate()([context, x]))
    return keras.Model([source, target], layers.Dense(30)(x))


def translator() -> Any:
    """LSTM to LSTM by both states."""
    source, target = keras.Input((8, 12)), keras.Input((6, 10))
    _, *states = layers.LSTM(16, return_state=True)(source)
    x, _, _ = layers.LSTM(16, return_sequences=True, return_state=True)(
        target, initial_state=states
    )
    return keras.Model([source, target], layers.Dense(10, activation="softmax")(x))


def padded_reviews() -> Any:
    """Text of a fixed length whose padding is masked, an LSTM in both directions."""
    ids = keras.Input((20,), dtype="int32")
    x = layers.Embedding(50, 16, mask_zero=True)(ids)
    x = layers.Bidirectional(layers.LSTM(8))(x)
    return keras.Model(ids, layers.Dense(1, activation="sigmoid")(x))


def tagger() -> Any:
    """A tag for each word: padding masked, a GRU in both directions."""
    ids = keras.Input((12,), dtype="int32")
    x = layers.SpatialDropout1D(0.1)(layers.Embedding(50, 16, mask_zero=True)(ids))
    x = layers.Bidirectional(layers.GRU(8, return_sequences=True))(x)
    return keras.Model(ids, layers.TimeDistributed(layers.Dense(6, activation="softmax"))(x))


def missing_steps() -> Any:
    """Sensors whose missing steps are -1, masked."""
    inputs = keras.Input((16, 3))
    x = layers.GRU(12)(layers.Masking(mask_value=-1.0)(inputs))
    return keras.Model(inputs, layers.Dense(2)(x))


class NormalizedConvolution(layers.Layer):
    """A causal dilated convolution of a direction times a length, as the first TCN had."""

    def __init__(self, filters: int, dilation: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filters, self.dilation = filters, dilation

    def build(self, input_shape: Any) -> None:
        self.v = self.add_weight("v", (3, input_shape[-1], self.filters))
        self.g = self.add_weight("g", (self.filters,), initializer="ones")
        self.b = self.add_weight("b", (self.filters,), initializer="zeros")

    def call(self, x: Any) -> Any:
        kernel = self.g * self.v / tf.norm(self.v, axis=[0, 1])
        x = tf.pad(x, [[0, 0], [2 * self.dilation, 0], [0, 0]])
        return tf.nn.conv1d(x, kernel, 1, "VALID", dilations=self.dilation) + self.b


def weight_normalized() -> Any:
    """Residual blocks of them."""
    inputs = keras.Input((32, 4))
    x = inputs
    for dilation in (1, 2, 4):
        y = layers.SpatialDropout1D(0.1)(layers.ReLU()(NormalizedConvolution(12, dilation)(x)))
        y = layers.ReLU()(NormalizedConvolution(12, dilation)(y))
        x = layers.ReLU()(y + (x if x.shape[-1] == 12 else layers.Conv1D(12, 1)(x)))
    return keras.Model(inputs, layers.Dense(3)(x[:, -1]))


def deep_interest() -> Any:
    """DIN: what a user saw, weighted by how it fits the candidate; PReLU."""
    history, candidate = keras.Input((10,), dtype="int32"), keras.Input((1,), dtype="int32")
    items = layers.Embedding(40, 8)
    seen, wanted = items(history), items(candidate)
    repeated = tf.tile(wanted, [1, 10, 1])
    x = tf.concat([repeated, seen, repeated - seen, repeated * seen], axis=-1)
    scores = layers.Dense(1)(layers.Dense(16, activation="sigmoid")(x))
    scores = tf.transpose(scores, [0, 2, 1]) / (8**0.5)
    there = tf.cast(tf.not_equal(history, 0), tf.float32)[:, tf.newaxis]
    scores = scores * there + (1.0 - there) * (-(2.0**20))
    user = tf.squeeze(tf.matmul(tf.nn.softmax(scores), seen), 1)
    x = tf.concat([user, tf.squeeze(wanted, 1)], axis=-1)
    x = layers.PReLU()(layers.Dense(16)(layers.BatchNormalization()(x)))
    return keras.Model([history, candidate], layers.Dense(1, activation="sigmoid")(x))


def behaviour() -> Any:
    """Films and ratings of a user as a sequence, beside the user's own features."""
    films, ratings = keras.Input((8,), dtype="int32"), keras.Input((8,))
    user = keras.Input((5,))
    x = layers.Embedding(40, 16)(films) + layers.Embedding(8, 16)(tf.range(8))
    x = x * tf.expand_dims(ratings, -1)
    y = layers.Dropout(0.1)(layers.MultiHeadAttention(2, 16, dropout=0.1)(x, x))
    x = layers.LayerNormalization()(layers.Add()([x, y]))
    y = layers.Dropout(0.1)(layers.Dense(16)(layers.LeakyReLU()(x)))
    x = layers.Flatten()(layers.LayerNormalization()(layers.Add()([x, y])))
    x = layers.Concatenate()([x, user])
    x = layers.LeakyReLU()(layers.BatchNormalization()(layers.Dense(16)(x)))
    return keras.Model([films, ratings, user], layers.Dense(1)(layers.Dropout(0.1)(x)))


class EdgeNetwork(layers.Layer):
    """Messages of neighbours by a matrix that the bond says, padded graphs."""

    def build(self, input_shape: Any) -> None:
        self.units = input_shape[0][-1]
        self.kernel = self.add_weight("kernel", (input_shape[1][-1], self.units * self.units))
        self.bias = self.add_weight("bias", (self.units * self.units,), initializer="zeros")

    def call(self, inputs: Any) -> Any:
        atoms, bonds = inputs
        matrices = tf.matmul(bonds, self.kernel) + self.bias
        matrices = tf.reshape(matrices, (-1, *bonds.shape[1:3], self.units, self.units))
        return tf.einsum("bijuv,bjv->biu", matrices, atoms)


def message_passing() -> Any:
    """Atoms and bonds of molecules; two rounds with a shared layer, then the sum."""
    atoms, bonds = keras.Input((6, 5)), keras.Input((6, 6, 3))
    x, message, update = layers.Dense(8)(atoms), EdgeNetwork(), layers.Dense(8, activation="relu")
    for _ in range(2):
        x = update(tf.concat([x, message([x, bonds])], axis=-1))
    x = layers.Lambda(lambda t: tf.reduce_sum(t, axis=1))(x)
    return keras.Model([atoms, bonds], layers.Dense(1, activation="sigmoid")(x))


def attentive_statistics() -> Any:
    """ECAPA-TDNN: convolutions in a chain of parts, gates, mean and deviation by attention."""
    inputs = keras.Input((40, 8))
    x = layers.BatchNormalization()(layers.Conv1D(16, 5, padding="same", activation="relu")(inputs))
    parts = tf.split(layers.Conv1D(16, 1, activation="relu")(x), 4, axis=-1)
    chain = [parts[0]]
    for part in parts[1:]:
        y = part if len(chain) == 1 else part + chain[-1]
        chain.append(layers.Conv1D(4, 3, dilation_rate=2, padding="same", activation="relu")(y))
    y = layers.Conv1D(16, 1)(tf.concat(chain, axis=-1))
    gate = layers.Dense(4, activation="relu")(tf.reduce_mean(y, axis=1, keepdims=True))
    x = x + y * layers.Dense(16, activation="sigmoid")(gate)
    scores = tf.nn.softmax(layers.Conv1D(16, 1)(layers.Conv1D(8, 1, activation="tanh")(x)), axis=1)
    mean = tf.reduce_sum(scores * x, axis=1)
    variance = tf.reduce_sum(scores * x**2, axis=1) - mean**2
    deviation = tf.sqrt(tf.clip_by_value(variance, 1e-4, 1e4))
    x = layers.Dense(12)(layers.BatchNormalization()(tf.concat([mean, deviation], axis=-1)))
    return keras.Model(inputs, tf.math.l2_normalize(x, axis=-1))


class GraphConvolution(layers.Layer):
    """Nodes mixed by a constant adjacency, an LSTM over time for all nodes."""

    def __init__(self, adjacency: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.adjacency = tf.constant(adjacency, tf.float32)
        self.lstm, self.dense = layers.LSTM(12, activation="tanh"), layers.Dense(3)

    def build(self, input_shape: Any) -> None:
        self.weight = self.add_weight("weight", (input_shape[-1], 6))

    def call(self, x: Any) -> Any:
        mixed = tf.einsum("ij,bjtf->bitf", self.adjacency, x)
        nodes = tf.nn.relu(tf.concat([tf.matmul(mixed, self.weight), x], axis=-1))
        _, count, steps, features = nodes.shape
        y = self.dense(self.lstm(tf.reshape(nodes, (-1, steps, features))))
        return tf.transpose(tf.reshape(y, (-1, count, 3)), [0, 2, 1])


def traffic() -> Any:
    """Forecasts of five roads."""
    inputs = keras.Input((5, 12, 2))
    adjacency = (np.eye(5) + np.eye(5, k=1) + np.eye(5, k=-1)) / 3
    return keras.Model(inputs, GraphConvolution(adjacency)(inputs))


def top_experts() -> Any:
    """Experts of which the two with the highest gates count."""
    inputs = keras.Input((12,))
    logits = layers.Dense(4)(inputs)
    least = tf.math.top_k(logits, k=2)[0][:, -1:]
    gates = tf.nn.softmax(tf.where(logits >= least, logits, tf.ones_like(logits) * -1e9))
    experts = [layers.Dense(8)(layers.Dense(16, activation="relu")(inputs)) for _ in range(4)]
    x = tf.reduce_sum(tf.expand_dims(gates, -1) * tf.stack(experts, axis=1), axis=1)
    return keras.Model(inputs, layers.Dense(3)(x))


class TransposedDense(layers.Layer):
    """A dense layer by the transposed kernel of another."""

    def __init__(self, dense: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = dense

    def build(self, input_shape: Any) -> None:
        self.bias = self.add_weight("bias", (self.dense.kernel.shape[0],), initializer="zeros")

    def call(self, x: Any) -> Any:
        return tf.nn.relu(tf.matmul(x, self.dense.kernel, transpose_b=True) + self.bias)


def tied_autoencoder() -> Any:
    """A decoder with the encoder's weights."""
    inputs = keras.Input((20,))
    first, second = layers.Dense(12, activation="relu"), layers.Dense(6, activation="relu")
    x = second(first(inputs))
    return keras.Model(inputs, TransposedDense(first)(TransposedDense(second)(x)))


def quantiles() -> Any:
    """Quantiles that can't cross: a first one and sums of positive steps; two series."""
    inputs = keras.Input((24, 3))
    x = layers.Conv1D(16, 3, padding="causal", activation="swish")(inputs)
    x = layers.Concatenate()([layers.GRU(8)(x), layers.GlobalMaxPooling1D()(x)])
    first, steps = layers.Dense(1)(x), layers.Dense(4, activation="softplus")(x)
    return keras.Model(inputs, tf.concat([first, first + tf.cumsum(steps, axis=-1)], axis=-1))


SEQUENCES_AND_COLUMNS: tuple[Callable[[], Any], ...] = (
    *(tab_transformer, variable_selection, decision_forest, deep_sets, recurrent_autoencoder),
    *(attending_decoder, translator, padded_reviews, tagger, missing_steps, weight_normalized),
    *(deep_interest, behaviour, message_passing, attentive_statistics, traffic, top_experts),
    *(tied_autoencoder, quantiles),
)
