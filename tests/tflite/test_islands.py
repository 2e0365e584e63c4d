"""Tests float nodes: their results, and their operators in files."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import quantize_on
from tests.tflite.islands import (
    PARAMS,
    SEQUENCE,
    check,
    close,
    computed,
    file_of,
    in_float,
    layers,
    made,
    random_inputs,
    results,
)


def called_twice(x: Any) -> Any:
    shared = layers.LayerNormalization()
    return shared(tf.sin(shared(x)))


OF_SEQUENCES: dict[str, Callable[..., Any]] = {
    "layer_normalization": lambda x: layers.LayerNormalization()(x),
    "layer_normalization_of_axes": lambda x: layers.LayerNormalization((1, 2), center=False)(x),
    "lstm": lambda x: layers.LSTM(3)(x),
    "lstm_unrolled": lambda x: layers.LSTM(3, unroll=True)(x),
    "gru_with_state": lambda x: layers.GRU(3, return_sequences=True, return_state=True)(x),
    "bidirectional": lambda x: layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x),
    "stacked_cells": lambda x: layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)])(x),
    "lambda": lambda x: layers.Lambda(lambda x: tf.sin(x) * tf.constant(0.5))(x),
    "softsign": lambda x: layers.Activation("softsign")(x),
    "attention": lambda x: layers.MultiHeadAttention(2, 3)(x, x),
    "operations": lambda x: tf.pow(tf.nn.softplus(x), 1.5)[:, ::2],
    "called_twice": called_twice,
    "nothing_to_compute": lambda x: [layers.Dropout(0.5)(x), tf.sin(x), tf.identity(x)],
    "a_constant": lambda x: [tf.sin(x), layers.Lambda(lambda x: tf.ones((2, 3)))(x)],
    "a_result_twice": lambda x: [y := tf.sin(x), layers.Dropout(0.5)(y)],
    "a_loop": layers.Lambda(
        lambda x: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.sin(y)), [0, x])[1]
    ),
    "a_condition": layers.Lambda(
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x), lambda: tf.cos(x))
    ),
    "two_loops": lambda x: [layers.LSTM(3)(x), layers.GRU(2)(x)],
}
EXAMPLES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{name: (build, (SEQUENCE,)) for name, build in OF_SEQUENCES.items()},
    "group_normalization": (lambda x: layers.GroupNormalization(2)(x), ((8, 8, 4),)),
    "group_normalization_of_any_size": (lambda x: layers.GroupNormalization(2)(x), ((None, 8, 4),)),
    "lstm_of_any_length": (
        lambda x: layers.LSTM(3, return_sequences=True, go_backwards=True)(x),
        ((None, 4),),
    ),
    "conv_lstm": (lambda x: layers.ConvLSTM2D(3, 2)(x), ((3, 6, 6, 2),)),
    "conv3d": (lambda x: layers.Conv3D(3, 2, groups=3, activation="relu")(x), ((4, 4, 4, 3),)),
    "locally_connected": (
        lambda x: layers.LocallyConnected2D(3, 2, activity_regularizer="l2")(x),
        ((5, 5, 2),),
    ),
    "dot": (lambda x, y: layers.Dot(2, normalize=True)([x, y]), (SEQUENCE, SEQUENCE)),
    "random_crop": (lambda x: layers.RandomCrop(5, 6)(x), ((8, 8, 3),)),
    "resizing": (lambda x: layers.Resizing(5, 6)(x), ((8, 8, 3),)),
    "several_ends": (
        lambda x, y: [layers.LayerNormalization()(x * y), tf.nn.softplus(x), tf.argmax(y, -1)],
        (SEQUENCE, SEQUENCE),
    ),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EXAMPLES)
def test_files_compute_what_keras_does(name):
    build, shapes = EXAMPLES[name]
    check(made(build, *shapes))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "build",
    [
        lambda x: layers.CategoryEncoding(9, output_mode="multi_hot")(x),
        lambda x: layers.CategoryEncoding(9, output_mode="count")(x),
        lambda x: layers.Embedding(9, 3)(x),
        lambda x: layers.LSTM(3, return_sequences=True)(layers.Embedding(9, 3, mask_zero=True)(x)),
        lambda x: layers.Bidirectional(layers.GRU(3))(
            layers.LSTM(3, return_sequences=True)(layers.Embedding(9, 3, mask_zero=True)(x))
        ),
        lambda x: layers.LSTM(3)(layers.Embedding(9, 3)(x), mask=tf.not_equal(x, 2)),
    ],
    ids=["multi_hot", "count", "embedding", "masked", "masked_twice", "mask_given"],
)
def test_integers(build):
    check(made(build, (5,), dtype="int32"))


@pytest.mark.slow
def test_masks_from_tensors_inside_another_island():
    def build(x: Any) -> Any:
        y = layers.Masking()(tf.nn.relu(x))
        return layers.GRU(3)(layers.Add()([y, y]))

    model = made(build, SEQUENCE)
    graph, (x,) = in_float(model), random_inputs(model)
    x[:, 3:] = -1
    close(results(graph, [x], file_of(graph)), computed(graph, [x]))


def test_quantized_tensors_are_dequantized_once():
    def build(x: Any) -> list[Any]:
        y = layers.Add()([x, x])
        return [
            tf.sin(x),
            layers.LayerNormalization(name="norm")(y),
            layers.Add()([tf.cos(x), y]),
            tf.exp(y),
        ]

    model = made(build, SEQUENCE)
    graph = in_float(model, PARAMS)
    contents, given = file_of(graph), random_inputs(model)
    names = [name for name, _, _ in FileInterpreter(contents).operations()]
    assert names.count("DEQUANTIZE") == 3  # Two tensors and an output.
    (x,) = (np.asarray(PARAMS.dequantize(PARAMS.quantize(item))) for item in given)
    y = np.asarray(PARAMS.dequantize(PARAMS.quantize(2 * x))).astype(np.float32)
    result = results(graph, given, contents)
    expected = [np.sin(x), np.asarray(model.get_layer("norm")(y)), np.exp(y)]
    close([*result[:2], result[3]], expected)


def test_what_enters_and_nobody_reads_is_left_out():
    model = made(lambda x: layers.Lambda(lambda x: tf.ones((2, 3)))(x), SEQUENCE)
    graph = in_float(model, PARAMS)
    names = [name for name, _, _ in FileInterpreter(file_of(graph)).operations()]
    assert "DEQUANTIZE" not in names


def test_tensors_are_named_after_their_nodes():
    def build(x: Any) -> Any:
        return tf.sin(layers.LayerNormalization(name="block/norm")(tf.cos(x)))

    file = FileInterpreter(file_of(in_float(made(build, SEQUENCE))))
    details = {tensor["index"]: tensor["name"] for tensor in file.interpreter.get_tensor_details()}
    operations = file.interpreter._get_ops_details()
    made_names = [
        details[operation["outputs"][0]]
        for operation in operations
        if operation["op_name"] != "DELEGATE"
    ]
    assert made_names[0].startswith("keras_qat/tf.math.cos")
    assert all(name.startswith("keras_qat/block/norm/") for name in made_names[1:-1])


def test_constants_are_named_alike_once_a_model_is_loaded(tmp_path):
    """A loaded model passes a list to `tf.tile` instead of a tensor."""
    x = layers.Input((4,))
    grid = tf.tile(tf.constant([[1, 2, 3, 4]]), [tf.shape(x)[0], 1])
    model = keras.Model(x, layers.Dense(2)(x) + tf.cast(grid[:, :2], tf.float32))
    qat = quantize_on(model, np.eye(4, dtype=np.float32))
    contents = keras_qat.export_tflite(qat)
    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == contents


def test_plan_reports_what_no_file_can_hold():
    model = made(lambda x: tf.math.digamma(layers.LayerNormalization()(x)), SEQUENCE)
    reasons = keras_qat.plan(model).float_layers
    assert [name for name, why in reasons.items() if "no file" in why] == ["tf.math.digamma"]
    assert reasons["tf.math.digamma"].endswith("TFLite has no operation for tf.Digamma")


SAME_BYTES = """
import hashlib
from tests.tflite.islands import SEQUENCE, file_of, in_float, layers, made
build = lambda x: layers.GRU(3)(layers.LayerNormalization()(x))
print(hashlib.sha256(file_of(in_float(made(build, SEQUENCE)))).hexdigest())
"""


@pytest.mark.slow
def test_other_processes_write_the_same_bytes():
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for code in (SAME_BYTES, "import tensorflow as tf\ntf.sin(1.0)" + SAME_BYTES)
    ]
    assert runs[0].stdout.split()[-1] == runs[1].stdout.split()[-1]
