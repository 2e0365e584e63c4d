"""Layers of sequences, attention, volumes and channels first, and layers that stay in float."""

from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras
from tests.networks.families import Family, Shape, Structure, chain, each_alone
from tests.networks.small import functional, layers


def _recurrent(make: Any) -> dict[str, Structure]:
    return {
        "last": chain(partial(make, 5)),
        "sequence": chain(partial(make, 5, return_sequences=True)),
        "unrolled": chain(partial(make, 5, unroll=True)),
        "backwards": chain(partial(make, 5, go_backwards=True, return_sequences=True)),
        "both_ways": lambda x: layers.Bidirectional(make(3, return_sequences=True))(x),
        "masked": chain(partial(layers.Masking, 0.5), partial(make, 5)),
        "masked_sequence": chain(layers.Masking, partial(make, 4, return_sequences=True)),
        "dropout": chain(partial(make, 5, dropout=0.2)),
        "state": lambda x: make(5, return_state=True)(x)[1],
        "stacked": chain(partial(make, 4, return_sequences=True), partial(make, 5)),
    }


RECURRENT = {
    "lstm": chain(partial(layers.LSTM, 5), partial(layers.Dense, 3)),
    "gru_both_ways": lambda x: layers.Bidirectional(layers.GRU(3, return_sequences=True))(x),
    "masked": chain(partial(layers.Masking, 0.5), partial(layers.SimpleRNN, 4)),
}

CELLS = {
    "cells": lambda x: layers.RNN([layers.LSTMCell(5), layers.GRUCell(4)])(x),
    "one_cell": lambda x: layers.RNN(layers.SimpleRNNCell(5), return_sequences=True)(x),
    "initial_state": lambda x: layers.GRU(5)(x, initial_state=layers.GRU(5)(x)),
    "before_reset": chain(partial(layers.GRU, 5, reset_after=False)),
    "relu": chain(partial(layers.LSTM, 5, activation="relu")),
    "dense_behind": chain(partial(layers.LSTM, 4), partial(layers.Dense, 3)),
}


def _per_step(layer: Any) -> Structure:
    return lambda x: layers.TimeDistributed(layer())(x)


TIME_DISTRIBUTED = {
    "conv_relu": _per_step(partial(layers.Conv2D, 3, 3, activation="relu")),
    "separable": _per_step(partial(layers.SeparableConv2D, 3, 3)),
    "pooling": _per_step(layers.MaxPooling2D),
    "mean": _per_step(layers.GlobalAveragePooling2D),
    "flatten": _per_step(layers.Flatten),
    "dense": _per_step(partial(layers.Dense, 3)),
    "norm": _per_step(layers.BatchNormalization),
    "sequential": _per_step(
        lambda: keras.Sequential(
            [
                layers.Conv2D(4, 3, use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Flatten(),
                layers.Dense(3, activation="tanh"),
            ]
        )
    ),
    "functional": _per_step(
        lambda: functional((6, 6, 3), build=lambda x: layers.Add()([x, layers.Conv2D(3, 1)(x)]))
    ),
}


def _attend(*args: Any, **kwargs: Any) -> Structure:
    def build(x: Any, z: Any) -> Any:
        return layers.MultiHeadAttention(*args, **kwargs)(x, z)

    return build


def _attend_over_images(x: Any, z: Any) -> Any:
    images = layers.Reshape((2, 3, 4))(x), layers.Reshape((5, 1, 4))(z)
    return layers.MultiHeadAttention(2, 3, output_shape=(2, 5))(*images)


ATTENTION = {
    "cross": _attend(2, 3),
    "self": lambda x, z: layers.MultiHeadAttention(2, 4)(x, x),
    "over_images": _attend_over_images,
    "no_bias": _attend(2, 3, use_bias=False, dropout=0.1),
    "value_size": _attend(2, 3, value_dim=4, output_shape=7),
    "dot_product": lambda x, z: layers.Attention()([x, z]),
    "with_key_and_dropout": lambda x, z: layers.Attention(dropout=0.2)([x, z, layers.ReLU()(z)]),
    "scores": lambda x, z: layers.Attention()([z, x], return_attention_scores=True)[1],
    "causal_product": lambda x, z: layers.Attention()([x, x], use_causal_mask=True),
    "causal": lambda x, z: layers.MultiHeadAttention(2, 3)(x, z, use_causal_mask=True),
    "scaled": lambda x, z: layers.Attention(use_scale=True)([x, z]),
    "concatenated": lambda x, z: layers.Attention(score_mode="concat")([x, z]),
    "luong": lambda x, z: layers.Attention(use_scale=True)([x, layers.Dense(4)(z)]),
    "bahdanau": lambda x, z: layers.AdditiveAttention()([x, layers.Dense(4)(z)]),
}

PRODUCTS = {
    "dot": lambda x, z: layers.Dot(axes=2)([x, z]),
    "matmul": lambda x, z: tf.matmul(x, z, transpose_b=True),
    "matmul_of_lists": lambda x, z: tf.matmul([x, -x], [z, z], transpose_b=True)[1],
    "einsum_of_two": lambda x, z: tf.einsum("abc,adc->abd", x, z),
}

VOLUMES = {
    "max": chain(layers.MaxPooling3D),
    "max_same": chain(partial(layers.MaxPooling3D, 3, 2, padding="same")),
    "average": chain(layers.AveragePooling3D),
    "global_max": chain(layers.GlobalMaxPooling3D),
    "global_average": chain(layers.GlobalAveragePooling3D),
    "padding": chain(layers.ZeroPadding3D),
    "upsampling": chain(layers.UpSampling3D),
    "conv": chain(partial(layers.Conv3D, 3, 2, activation="relu")),
    "conv_same": chain(partial(layers.Conv3D, 3, 3, strides=(2, 1, 2), padding="same")),
    "conv_dilated": chain(partial(layers.Conv3D, 3, 2, dilation_rate=(3, 2, 1), use_bias=False)),
    "conv_norm": chain(partial(layers.Conv3D, 3, (1, 2, 3)), layers.BatchNormalization),
}

FLOAT_VOLUMES = {"transposed": chain(partial(layers.Conv3DTranspose, 3, 3, strides=(2, 1, 2)))}

_first = {"data_format": "channels_first"}

CHANNELS_FIRST = {
    "conv": chain(partial(layers.Conv2D, 3, 3, **_first)),
    "conv_norm_relu": chain(
        partial(layers.Conv2D, 4, 3, padding="same", use_bias=False, **_first),
        partial(layers.BatchNormalization, axis=1),
        layers.ReLU,
    ),
    "depthwise": chain(partial(layers.DepthwiseConv2D, 3, **_first)),
    "separable": chain(partial(layers.SeparableConv2D, 3, 3, **_first)),
    "along_columns": chain(partial(layers.Conv2D, 3, 3, activation="softmax", **_first)),
    "separable_along_columns": chain(
        partial(layers.SeparableConv2D, 3, 3, activation="softmax", **_first)
    ),
    "max": chain(partial(layers.MaxPooling2D, **_first)),
    "average": chain(partial(layers.AveragePooling2D, **_first)),
    "mean": chain(partial(layers.GlobalAveragePooling2D, **_first)),
    "flatten": chain(partial(layers.Flatten, **_first)),
    "upsampling": chain(partial(layers.UpSampling2D, **_first)),
    "norm": chain(partial(layers.BatchNormalization, axis=1)),
    "residual": lambda x: layers.Add()(
        [x, layers.Conv2D(4, 3, padding="same", activation="relu", **_first)(x)]
    ),
    "joined": lambda x: layers.Concatenate(axis=1)([x, layers.Conv2D(2, 1, **_first)(x)]),
    "softmax": lambda x: layers.Softmax()(layers.Conv2D(2, 1, **_first)(x)),
}


@keras.utils.register_keras_serializable("tests")
class Scale(layers.Layer):
    """A custom layer that the converter would quantize, including its weights."""

    def build(self, input_shape: Any) -> None:
        self.factors = self.add_weight(
            name="factors", shape=(input_shape[-1],), initializer="random_normal"
        )

    def call(self, inputs: Any) -> Any:
        return inputs * self.factors


def _activation(name: str) -> Structure:
    return chain(partial(layers.Activation, name))


PASS_THROUGH = {
    **{name: _activation(name) for name in ("selu", "softplus", "softsign", "exponential", "mish")},
    "elu_alpha": chain(partial(layers.ELU, 0.5)),
    "custom": chain(Scale),
    "custom_between": chain(partial(layers.Conv2D, 3, 3), Scale, partial(layers.Conv2D, 2, 3)),
    "group_norm": chain(partial(layers.GroupNormalization, 2)),
    "layer_norm": chain(layers.LayerNormalization),
    "xlogy": lambda x: tf.math.xlogy(x, 3.0),
    "variance": lambda x: tf.math.reduce_variance(x, [1, 2]),
}

AUGMENTATION = {
    "flip": chain(layers.RandomFlip),
    "rotation": chain(partial(layers.RandomRotation, 0.1)),
    "zoom": chain(partial(layers.RandomZoom, 0.1)),
    "translation": chain(partial(layers.RandomTranslation, 0.1, 0.1)),
    "contrast": chain(partial(layers.RandomContrast, 0.1)),
    "inside": chain(
        layers.RandomFlip, partial(layers.Rescaling, 0.5), partial(layers.Conv2D, 3, 3)
    ),
    "identity": lambda x: tf.identity(x),
}

_join = layers.Concatenate


def _sigmoid(x: Any) -> Any:
    return layers.Activation("sigmoid")(x)


FIXED_RANGES = {
    "fixed_sigmoid_and_input": lambda x, z: _join()([_sigmoid(x), z]),
    "fixed_relu_and_tanh": lambda x, z: _join()([layers.ReLU()(x), layers.Activation("tanh")(z)]),
    "fixed_maximum": lambda x, z: layers.Maximum()([_sigmoid(x), layers.ReLU(6.0)(z)]),
    "fixed_nested": lambda x, z: _join()([_join()([layers.Softmax()(x), x]), z]),
    "fixed_behind_pooling": lambda x, z: _join()(
        [layers.MaxPooling2D(1)(layers.Activation("tanh")(x)), layers.Conv2D(2, 1)(z)]
    ),
    "fixed_operation": lambda x, z: tf.concat([tf.sigmoid(x), z], axis=1),
}

FIXED_ONLY = {"sigmoid_and_tanh": lambda x, z: _join()([_sigmoid(x), layers.Activation("tanh")(z)])}

_SEQUENCE: list[Shape] = [(6, 4)]
_IMAGE: list[Shape] = [(6, 6, 4)]

FAMILIES: dict[str, Family] = {
    "recurrent": Family([(None, 4)], RECURRENT, int8=False, sizes=[(5, 4)]),
    "lstm": Family(_SEQUENCE, _recurrent(layers.LSTM), slow=True),
    "gru": Family(_SEQUENCE, _recurrent(layers.GRU), slow=True),
    "simple_rnn": Family(_SEQUENCE, _recurrent(layers.SimpleRNN), slow=True),
    "cells": Family([(None, 4)], CELLS, int8=False, sizes=[(7, 4)], slow=True),
    "conv_lstm": Family(
        [(3, 6, 6, 2)], {"conv_lstm": chain(partial(layers.ConvLSTM2D, 3, 3))}, slow=True
    ),
    "time_distributed": Family([(3, 6, 6, 3)], TIME_DISTRIBUTED),
    "attention": Family([(6, 4), (5, 4)], ATTENTION),
    **each_alone([(6, 4), (5, 4)], PRODUCTS),
    "volumes": Family([(4, 5, 6, 3)], VOLUMES),
    "float_volumes": Family([(4, 4, 4, 3)], FLOAT_VOLUMES, int8=False),
    "channels_first": Family([(4, 6, 6)], CHANNELS_FIRST),
    "pass_through": Family(_IMAGE, PASS_THROUGH, int8=False),
    "augmentation": Family(_IMAGE, AUGMENTATION),
    **each_alone(_IMAGE * 2, FIXED_RANGES),
    "fixed_only": Family(_IMAGE * 2, FIXED_ONLY),
}
