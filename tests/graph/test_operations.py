"""Tests the table of TensorFlow functions, the only place with their names."""

import ast
import re
from pathlib import Path

import pytest
import tensorflow as tf

from keras_qat.graph import operations
from keras_qat.graph.operations import (
    FUNCTIONS,
    KINDS,
    OTHER_KINDS,
    draws_random_numbers,
    get_kind,
    get_operands,
)
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import keras

TABLE = Path(operations.__file__)
MODULES = sorted(TABLE.parent.parent.rglob("*.py"))
NAME = re.compile(rf"({'|'.join(map(re.escape, filter(None, FUNCTIONS)))})\.\w*")


def test_names_are_functions_sorted_and_listed_once():
    for name in KINDS:
        found = keras.backend if name.startswith("keras.") else tf
        for part in name.removeprefix("keras.backend.").split("."):
            found = getattr(found, part)
        assert callable(found), name
    for module, listed in FUNCTIONS.items():
        functions = listed.split()
        assert functions == sorted(set(functions)), module
    assert OTHER_KINDS.keys() <= KINDS.keys()


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: 1.0 + x, "add"),
        (lambda x: tf.add(x, x), "add"),
        (lambda x: x / 2.0, "divide"),
        (lambda x: x[:, 0], "getitem"),
        (lambda x: tf.squeeze(x[:, :1], 1), "squeeze"),
        (lambda x: tf.gather(x, [0], axis=1), "gather"),
        (tf.image.transpose, "transpose_image"),
        (tf.math.bessel_i0, "math.bessel_i0"),
        (keras.layers.ReLU(), ""),
    ],
)
def test_kinds(function, kind):
    assert get_kind(function(keras.Input((4, 4)))._keras_history.layer) == kind


def test_random_operations():
    x = keras.Input((4,))
    assert draws_random_numbers(tf.nn.dropout(x, 0.5)._keras_history.layer)
    assert not draws_random_numbers(tf.nn.relu(x)._keras_history.layer)


def test_no_other_module_spells_names():
    """Other modules compare kinds (`get_kind`), or print `name_in_tensorflow`."""
    for module in MODULES:
        strings = (
            node.value
            for node in ast.walk(ast.parse(module.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        assert module == TABLE or not list(filter(NAME.fullmatch, strings)), module


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: tf.reduce_mean(x, 1, True), [1, True]),
        (lambda x: tf.reduce_mean(x, keepdims=True), [None, True]),
        (lambda x: tf.concat([x, x], axis=-1), [-1, None]),
    ],
)
def test_arguments_by_name(function, expected):
    x = keras.Input((4, 4))
    (call,) = read_model(keras.Model(x, function(x))).calls
    assert get_operands(call, "axis", "keepdims") == expected


def test_arguments_of_tensorflow_1_have_the_names_of_tensorflow_2():
    x, kernel = keras.Input((8, 8, 3)), tf.ones((3, 3, 3, 1))
    y = tf.compat.v1.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME", rate=(2, 2))
    (call,) = read_model(keras.Model(x, y)).calls
    assert get_operands(call, "filters", "padding", "dilations")[1:] == ["SAME", (2, 2)]
