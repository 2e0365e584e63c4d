"""Tests layers that Keras 3 and Keras 2 share, with options that differ: outputs and weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from keras_qat.keras2.backend import keras as keras_2
from tests.imports.keras3.comparison import assert_converts

keras = pytest.importorskip("keras", minversion="3.0")
L = keras.layers
IMAGE, STEPS, VECTOR, MOVIE = (8, 8, 4), (6, 4), (5,), (3, 8, 8, 2)

ONE_INPUT: dict[tuple[int, ...], dict[str, Callable[[], Any]]] = {
    IMAGE: {
        "conv": lambda: L.Conv2D(3, 3, 2, "same", activation="relu", kernel_regularizer="l2"),
        "dilated": lambda: L.Conv2D(3, 3, dilation_rate=2, use_bias=False),
        "grouped": lambda: L.Conv2D(4, 3, groups=2),
        "depthwise": lambda: L.DepthwiseConv2D(3, depth_multiplier=2, activation="relu6"),
        "separable": lambda: L.SeparableConv2D(3, 3, activation="silu"),
        "transposed": lambda: L.Conv2DTranspose(3, 3, 2, "same"),
        "transposed_valid": lambda: L.Conv2DTranspose(3, 3, 2, output_padding=1),
        "batch_norm": lambda: L.BatchNormalization(epsilon=0.01),
        "batch_norm_axis": lambda: L.BatchNormalization(axis=1, scale=False),
        "layer_norm": lambda: L.LayerNormalization(axis=[2, 3]),
        "group_norm": lambda: L.GroupNormalization(2),
        "unit_norm": L.UnitNormalization,
        "normalization": lambda: L.Normalization(mean=[1.0, 2, 3, 4], variance=[1.0, 2, 3, 4]),
        "adapted": lambda: L.Normalization(axis=(1, 3)),
        "rescaling": lambda: L.Rescaling([1.0, 2, 3, 4], np.arange(4.0)),
        "resizing": lambda: L.Resizing(5, 6, interpolation="bilinear"),
        "crop": lambda: L.CenterCrop(5, 6),
        "cropping": lambda: L.Cropping2D(((1, 2), (0, 1))),
        "padding": lambda: L.ZeroPadding2D(((1, 2), (0, 1))),
        "upsampling": lambda: L.UpSampling2D(2, interpolation="bilinear"),
        "upsampling_nearest": lambda: L.UpSampling2D((1, 3)),
        "max_pooling": lambda: L.MaxPooling2D(3, 2, "same"),
        "average_pooling": lambda: L.AveragePooling2D(3, 2, "same"),
        "global_average": lambda: L.GlobalAveragePooling2D(keepdims=True),
        "global_max": L.GlobalMaxPooling2D,
        "flatten": L.Flatten,
        "permute": lambda: L.Permute((2, 1, 3)),
        "reshape": lambda: L.Reshape((-1, 8)),
        "prelu": lambda: L.PReLU(shared_axes=[1, 2]),
        "leaky": lambda: L.LeakyReLU(0.1),
        "relu": lambda: L.ReLU(6.0, 0.1, 0.5),
        "elu": lambda: L.ELU(0.5),
        "softmax": lambda: L.Softmax(axis=1),
        "dropout": lambda: L.Dropout(0.3, seed=1),
        "spatial_dropout": lambda: L.SpatialDropout2D(0.3, seed=1),
        "noise": lambda: L.GaussianNoise(0.3, seed=2),
        "random_flip": L.RandomFlip,
        "random_rotation": lambda: L.RandomRotation(0.1),
        "random_contrast": lambda: L.RandomContrast(0.1, value_range=(0, 1)),
        "einsum": lambda: L.EinsumDense("bhwc,cd->bhwd", (None, None, 3), bias_axes="d"),
        "attention_2d": lambda: L.MultiHeadAttention(2, 3, attention_axes=(1, 2)),
        "activity": lambda: L.ActivityRegularization(0.1),
        "lambda": lambda: L.Lambda(lambda x: keras.ops.relu(x) * 2.0),
        "own_function": lambda: L.Dense(3, activation=lambda x: keras.ops.tanh(x) * 2.0),
        "own_initializer": lambda: L.Dense(3, kernel_initializer=lambda *a, **k: np.ones((4, 3))),
    },
    STEPS: {
        "conv_1d": lambda: L.Conv1D(3, 3, padding="causal"),
        "transposed_1d": lambda: L.Conv1DTranspose(3, 3),
        "depthwise_1d": lambda: L.DepthwiseConv1D(3),
        "separable_1d": lambda: L.SeparableConv1D(3, 3),
        "pooling_1d": lambda: L.MaxPooling1D(2),
        "average_1d": lambda: L.AveragePooling1D(2),
        "global_1d": L.GlobalAveragePooling1D,
        "padding_1d": lambda: L.ZeroPadding1D((1, 2)),
        "cropping_1d": lambda: L.Cropping1D((1, 2)),
        "upsampling_1d": lambda: L.UpSampling1D(2),
        "masking": lambda: L.Masking(),
        "lstm": lambda: L.LSTM(3, recurrent_activation="hard_sigmoid", dropout=0.1, seed=2),
        "lstm_sequence": lambda: L.LSTM(3, return_sequences=True, go_backwards=True),
        "gru": lambda: L.GRU(3),
        "gru_before": lambda: L.GRU(3, reset_after=False),
        "simple_rnn": lambda: L.SimpleRNN(3, activation="relu"),
        "rnn": lambda: L.RNN([L.LSTMCell(3), L.GRUCell(2)]),
        "bidirectional": lambda: L.Bidirectional(L.LSTM(3, return_sequences=True), "sum"),
        "bidirectional_two": lambda: L.Bidirectional(
            L.GRU(3), backward_layer=L.GRU(3, activation="relu", go_backwards=True)
        ),
        "time_distributed": lambda: L.TimeDistributed(L.Dense(3, activation="gelu")),
        "time_distributed_norm": lambda: L.TimeDistributed(L.BatchNormalization()),
        "identity": L.Identity,
    },
    VECTOR: {
        "dense": lambda: L.Dense(3, activation="hard_sigmoid", bias_constraint="non_neg"),
        "dense_layer": lambda: L.Dense(3, activation=L.LeakyReLU(0.1)),
        "repeat": lambda: L.RepeatVector(3),
        "alpha_dropout": lambda: L.AlphaDropout(0.1),
        "discretization": lambda: L.Discretization([-0.5, 0.5]),
    },
    MOVIE: {
        "conv_lstm": lambda: L.ConvLSTM2D(3, 3, recurrent_activation="hard_sigmoid"),
        "conv_3d": lambda: L.Conv3D(3, 2),
        "pooling_3d": lambda: L.AveragePooling3D(2),
        "time_distributed_conv": lambda: L.TimeDistributed(L.Conv2D(3, 3)),
        "global_3d": L.GlobalMaxPooling3D,
    },
}


LONG = pytest.param(STEPS, marks=pytest.mark.slow)
SHAPES = [LONG if shape == STEPS else shape for shape in ONE_INPUT]


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_of_one_input(shape):
    """One model for each shape is faster. Its outputs are named after the cases."""
    inputs, outputs = keras.Input(shape), {}
    for name, make in ONE_INPUT[shape].items():
        layer = make()
        twice = isinstance(layer, L.MultiHeadAttention)
        outputs[name] = layer(inputs, inputs) if twice else layer(inputs)
    assert_converts(keras.Model(inputs, outputs))


MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, z: L.Add()([x, z]),
    "subtract": lambda x, z: L.Subtract()([x, z]),
    "multiply": lambda x, z: L.Multiply()([x, z]),
    "average": lambda x, z: L.Average()([x, z]),
    "maximum": lambda x, z: L.Maximum()([x, z]),
    "minimum": lambda x, z: L.Minimum()([x, z]),
    "concatenate": lambda x, z: L.Concatenate(axis=1)([x, z]),
    "dot": lambda x, z: L.Dot(axes=2, normalize=True)([x, z]),
    "attention": lambda x, z: L.Attention(use_scale=True, score_mode="concat")([x, z]),
    "additive": lambda x, z: L.AdditiveAttention()([x, z]),
    "multi_head": lambda x, z: L.MultiHeadAttention(2, 3, value_dim=5)(x, z),
    "causal": lambda x, z: L.MultiHeadAttention(2, 3, dropout=0.1)(x, z, use_causal_mask=True),
    "scores": lambda x, z: L.MultiHeadAttention(2, 3)(x, z, return_attention_scores=True),
    "state": lambda x, z: L.LSTM(4, return_state=True)(x, initial_state=[z[:, 0], z[:, 1]]),
    "bidirectional_state": lambda x, z: L.Bidirectional(L.GRU(4, return_state=True))(x),
}


@pytest.mark.slow
def test_layers_of_two_inputs():
    inputs = [keras.Input(STEPS), keras.Input(STEPS)]
    outputs = {name: make(*inputs) for name, make in MERGES.items()}
    flat = {
        f"{name}_{i}": value
        for name, made in outputs.items()
        for i, value in enumerate(made if isinstance(made, (list, tuple)) else [made])
    }
    assert_converts(keras.Model(inputs, flat))


@pytest.mark.slow
def test_embedding_with_a_mask():
    inputs = keras.Input((7,), dtype="int32")
    x = L.Embedding(5, 4, mask_zero=True)(inputs)
    x = L.LSTM(3, return_sequences=True)(x)
    x = L.MultiHeadAttention(2, 3)(x, x)
    assert_converts(keras.Model(inputs, L.GlobalAveragePooling1D()(x)))


def test_words_become_numbers():
    vectorize = L.TextVectorization(max_tokens=6, output_sequence_length=4)
    vectorize.adapt(["the cat", "the dog"])
    inputs = keras.Input((1,), dtype="string")
    x = keras.Model(inputs, L.Embedding(6, 2)(vectorize(inputs)))
    assert_converts(x, np.array([["a dog"], ["the the cat"]], object))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_dtype_policies(policy):
    inputs = keras.Input((4,), dtype="float64" if policy == "float64" else "float32")
    x = L.Dense(3, dtype=keras.DTypePolicy(policy))(inputs)
    converted = assert_converts(keras.Model(inputs, L.ReLU(dtype=policy)(x)))
    (dense,) = (layer for layer in converted.layers if layer.weights)
    assert dense.dtype_policy.name == policy


NAMES = ["celu", "glu", "hard_shrink", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh"]
NAMES += ["leaky_relu", "log_sigmoid", "log_softmax", "relu6", "silu", "soft_shrink", "squareplus"]
NAMES += ["tanh_shrink", "elu", "exponential", "gelu", "linear", "mish", "relu", "selu", "sigmoid"]
NAMES += ["softmax", "softplus", "softsign", "tanh"]


def test_activations(tmp_path):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [L.Activation(name)(inputs) for name in NAMES])
    converted = assert_converts(model)
    converted.save(tmp_path / "model.keras")
    reloaded = keras_2.models.load_model(tmp_path / "model.keras")
    assert reloaded.get_config() == converted.get_config()
