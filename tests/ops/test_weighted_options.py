"""Tests options of weighted and normalization layers, refusals, and multiply-accumulates."""

import pytest
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.ops.multiply_accumulates import count_products
from keras_qat.ops.registry import ROWS, match
from tests.helpers import layers
from tests.ops.test_options import IMAGE, ROW, STEPS, assert_options, last_call, of

FILM = (5, 4, 4, 2)


OPTIONS = {
    "layer_norm": [
        of(layers.LayerNormalization(), STEPS)(epsilon=1e-3),
        of(layers.LayerNormalization([1], 0.25), ROW)(epsilon=0.25),
        of(layers.LayerNormalization(), (1, 2, 2, 6))(axes=1),
        of(layers.LayerNormalization([1, 2]), STEPS)(axes=2),
    ],
    "group_norm": [of(layers.GroupNormalization(3), IMAGE)(groups=3, epsilon=1e-3)],
    "embedding": [of(layers.Embedding(5, 3), ROW)()],
    "prelu": [of(layers.PReLU(), ROW)()],
    "einsum_dense": [
        of(layers.EinsumDense("abc,cd->abd", (5, 3)), STEPS)(bias_axes=""),
        of(layers.EinsumDense("...c,cd->...d", 3, bias_axes="d"), ROW)(bias_axes="d"),
    ],
    "einsum_dense_heads": [of(layers.EinsumDense("abc,cde->abde", (5, 3, 2)), STEPS)()],
    "einsum_dense_per_tensor": [
        of(layers.EinsumDense("abc,dc->abd", (5, 3)), STEPS)(equation="abc,dc->abd"),
        of(layers.EinsumDense("abc,cde->abde", (5, 3, 2), bias_axes="e"), STEPS)(),
        # With one step, a bias for each step is a bias for each channel.
        of(layers.EinsumDense("abc,cd->abd", (1, 4), bias_axes="bd"), (1, 5))(),
    ],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    for build, shapes, attributes in OPTIONS[name]:
        assert_options(name, last_call(build, shapes), attributes)


PLAIN = {"backwards": False, "sequences": False, "keeps": False}


def of_sequence(kind, *options, shape=STEPS, count=1, outputs=1, masked=False, **more):
    """Returns a call of an unbuilt recurrent layer on `count` tensors of one shape.

    The first tensor may have a mask.
    """
    given = more.pop("initial_state", None)
    values = [
        Value(f"x{i}", (None, *shape), "float32", masked=masked and i == 0) for i in range(count)
    ]
    results = [Value(f"y{i}", (None, 3), "float32") for i in range(outputs)]
    kwargs = {} if given is None else {"initial_state": given}
    args = (values if count > 1 else values[0],)
    return Call(kind(*options, **more), args, kwargs, results if outputs > 1 else results[0], "y")


RECURRENT = [
    ("lstm", (layers.LSTM, 3), {}, PLAIN),
    ("lstm", (layers.LSTM, 3), {"return_sequences": True}, {**PLAIN, "sequences": True}),
    ("lstm", (layers.LSTM, 3), {"go_backwards": True}, {**PLAIN, "backwards": True}),
    ("lstm", (layers.LSTM, 3), {"stateful": True}, {**PLAIN, "keeps": True}),
    ("gru", (layers.GRU, 3), {}, {**PLAIN, "hard": False, "reset_after": True}),
    (
        "gru",
        (layers.GRU, 3, "tanh", "hard_sigmoid"),
        {"reset_after": False},
        {"hard": True, "reset_after": False, "masked": False, "zeroes": False},
    ),
    ("gru", (layers.GRU, 3), {"shape": (64, 6)}, {}),
    ("gru", (layers.GRU, 3), {"count": 2}, {}),
    ("gru", (layers.GRU, 3), {"stateful": True}, {**PLAIN, "keeps": True}),
    ("simple_rnn", (layers.SimpleRNN, 3), {}, {**PLAIN, "relu": False}),
    ("simple_rnn_relu", (layers.SimpleRNN, 3, tf.nn.relu), {}, {**PLAIN, "relu": True}),
    (
        "conv_lstm",
        (layers.ConvLSTM2D, 3, 3, (1, 2), "same"),
        {"shape": FILM, "recurrent_activation": "sigmoid"},
        {"strides": (1, 2), "padding": "same", "hard": False, "dilation": (1, 1)},
    ),
]


@pytest.mark.parametrize(("name", "layer", "options", "attributes"), RECURRENT)
def test_options_of_recurrent_layers(name, layer, options, attributes):
    assert_options(name, of_sequence(*layer, **options), attributes)


LSTM, GRU, CONV = (layers.LSTM, 3), (layers.GRU, 3), (layers.ConvLSTM2D, 3, 3)
REFUSED_RECURRENT = [
    (LSTM, {"activation": "relu"}, "its activations are not tanh and sigmoid"),
    (LSTM, {"recurrent_activation": "tanh"}, "its activations are not tanh and sigmoid"),
    (LSTM, {"return_state": True}, "its states are inputs or outputs"),
    (LSTM, {"count": 3}, "its states are inputs or outputs"),
    (LSTM, {"masked": True}, "it has a mask"),
    (LSTM, {"initial_state": [1.0, 1.0]}, "it begins with a state that is a constant"),
    (LSTM, {"time_major": True}, "its inputs are not sequences of vectors"),
    (LSTM, {"shape": (5, 2, 3)}, "its inputs are not sequences of vectors"),
    (GRU, {"shape": (65, 6)}, "more than 64 steps"),
    (GRU, {"shape": (None, 6)}, "the number of steps is unknown"),
    (GRU, {"outputs": 2}, "it returns its state"),
    (GRU, {"count": 2, "stateful": True}, "it is stateful and has an initial state"),
    (GRU, {"activation": "relu"}, "its activations are not tanh and sigmoid or hard_sigmoid"),
    (GRU, {"recurrent_activation": "tanh"}, "its activations are not tanh and sigmoid or"),
    (GRU, {"masked": True, "count": 2}, "it has a mask"),
    ((layers.SimpleRNN, 3, "gelu"), {}, "its activations are not tanh and relu"),
    (CONV, {"shape": FILM, "return_state": True}, "it is stateful or reads or returns states"),
    (CONV, {"shape": FILM, "stateful": True}, "it is stateful or reads or returns states"),
    (CONV, {"shape": FILM, "count": 3}, "it is stateful or reads or returns states"),
    (CONV, {"shape": (5, None, 4, 2)}, "its image size is unknown"),
    (CONV, {"shape": (5, 4, None, 2)}, "its image size is unknown"),
    (CONV, {"shape": FILM, "data_format": "channels_first"}, "its channels come first"),
    (CONV, {"shape": FILM, "activation": "relu"}, "its activations are not tanh and"),
    (CONV, {"shape": STEPS}, "its inputs are not sequences of vectors"),
]


@pytest.mark.parametrize(("layer", "options", "reason"), REFUSED_RECURRENT)
def test_recurrent_layers_without_a_kernel(layer, options, reason):
    op, _, why = match(of_sequence(*layer, **options))
    assert op is None
    assert reason in why


PRODUCTS = [
    (layers.Conv2D(2, 3), IMAGE, 2 * 2 * 2 * (3 * 3 * 6)),
    (layers.Conv2D(4, 3, groups=2, strides=2, padding="same"), IMAGE, 2 * 2 * 4 * (3 * 3 * 3)),
    (layers.Conv1D(2, 3, padding="causal"), STEPS, 5 * 2 * (3 * 6)),
    (layers.DepthwiseConv2D(3, depth_multiplier=2), IMAGE, 2 * 2 * 12 * (3 * 3)),
    (layers.Conv2DTranspose(2, 3, 2), IMAGE, (4 * 4 * 6) * (3 * 3 * 2)),
    (layers.Dense(3), STEPS, 5 * 3 * 6),
    (layers.EinsumDense("abc,bcde->ade", (3, 2)), STEPS, 3 * 2 * (5 * 6)),
    (lambda x: tf.matmul(x, x, transpose_b=True), STEPS, 5 * 5 * 6),
    (lambda x: layers.LSTM(3)(x), STEPS, 5 * 4 * 3 * (6 + 3)),
    (lambda x: layers.ConvLSTM2D(3, 2)(x), FILM, 5 * 3 * 3 * (2 * 2 * 4 * 3 * (2 + 3))),
    (layers.MaxPooling2D(2), IMAGE, 0),
]
"""Layers, the shape of their input, and the number of products for one example."""


@pytest.mark.parametrize(("build", "shape", "count"), PRODUCTS)
def test_products_are_counted(build, shape, count):
    assert count_products(last_call(build, [shape])) == count


KINDS = {
    "clips": {"relu"},
    "can_merge_relu": {
        *("conv", "depthwise_conv", "transpose_conv", "dense", "affine", "einsum_dense"),
        *("einsum_dense_heads", "einsum_dense_per_tensor", "add", "subtract", "multiply"),
        *("max_pooling", "average_pooling"),
    },
    "folds_batch_norm": {"conv", "depthwise_conv", "transpose_conv", "dense"},
    "supports_int4": {
        *("conv", "dense", "einsum_dense", "einsum_dense_heads", "einsum_dense_per_tensor")
    },
    "multiplies_tensors": {"matmul", "contract"},
    "has_mark": {"mask_scores"},
    "alias": {"linear", "identity"},
    "is_table": {"embedding", "indices"},
    "is_constant": {"on_grid"},
    "reads_only_weights": {"weight"},
    "on_request": {"layer_norm", "group_norm"},
    "falls_back_to_input_range": {"mean"},
    "quantizes_constants": {
        *("add", "subtract", "multiply", "divide", "maximum", "minimum", "select"),
        *("greater", "greater_equal", "less", "less_equal", "equal", "not_equal"),
    },
}
"""Properties that only few operators have: name -> operators."""


@pytest.mark.parametrize("kind", KINDS)
def test_which_rows_are_of_a_kind(kind):
    assert {op.name for op in ROWS if getattr(op, kind)} == KINDS[kind]
