"""Tests `register_op` for custom layers: required arguments, and how long it lasts."""

import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import keras
from keras_qat.ops.registry import ROWS, match
from tests.comparison import Product
from tests.helpers import build_model


class Pick(keras.layers.Layer):
    """Softmax along an axis stored under another name."""

    dim = 2

    def call(self, inputs):
        return keras.activations.softmax(inputs, axis=self.dim)


def float_layers():
    model = build_model((4, 5), lambda x: Pick(name="pick")(keras.layers.Dense(5)(x)))
    recipe = keras_qat.recipes.int8().override("Pick", open=False)
    return list(keras_qat.plan(model, recipe).float_layers)


@pytest.mark.parametrize("attributes", [{"axis": -1}, lambda layer: {"axis": layer.dim}])
def test_a_layer_is_an_operator_until_that_is_undone(attributes):
    assert float_layers() == ["pick"]
    with keras_qat.register_op(Pick, "softmax", attributes=attributes):
        assert float_layers() == []
        inner = keras_qat.register_op(Pick, "move")
        inner.undo()
        assert float_layers() == []
    assert float_layers() == ["pick"]


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("softmax", None),
        ("softmax", {"axes": 1}),
        ("softmax", {"axis": 1, "beta": 2}),
        ("linear", {"axis": 1}),
    ],
)
def test_attributes_have_to_be_those_of_the_operator(op, attributes):
    with pytest.raises(ValueError, match=f"Pick as {op} needs the attributes"):
        keras_qat.register_op(Pick, op, attributes=attributes)


def test_attributes_that_are_read_later_are_checked_then():
    with (
        keras_qat.register_op(Pick, "softmax", attributes=lambda layer: {"dim": 1}),
        pytest.raises(ValueError, match="needs the attributes axis, and may have no others; it"),
    ):
        float_layers()


def test_there_has_to_be_such_an_operator():
    with pytest.raises(ValueError, match="There is no operator"):
        keras_qat.register_op(Pick, "argsort")


PLAIN = {
    "conv": (keras.layers.Conv2D(2, 3), (6, 6, 2)),
    "depthwise_conv": (keras.layers.DepthwiseConv2D(3), (6, 6, 2)),
    "transpose_conv": (keras.layers.Conv2DTranspose(2, 3), (6, 6, 2)),
    "dense": (keras.layers.Dense(2), (6,)),
    "add": (lambda x: x + x[:, :1], (6,)),
    "subtract": (lambda x: x - x[:, :1], (6,)),
    "unit_norm": (lambda x: tf.math.l2_normalize(x, -1, 0.0), (6,)),
    "reciprocal": (tf.math.reciprocal, (6,)),
    "one_hot": (lambda x: tf.one_hot(tf.argmax(x, -1), 3), (6,)),
    "layer_norm": (keras.layers.LayerNormalization(), (6,)),
    "matmul": (lambda x: tf.matmul(x, x), (4, 4)),
    "max_pooling": (keras.layers.MaxPooling2D(2), (6, 6, 2)),
    "average_pooling": (keras.layers.AveragePooling2D(2), (6, 6, 2)),
    "resize_nearest": (keras.layers.Resizing(3, 4, "nearest"), (6, 6, 2)),
    "resize_bilinear": (keras.layers.Resizing(3, 4), (6, 6, 2)),
    "concatenate": (lambda x: tf.concat([x, x[:, :1]], -1), (6,)),
    "stack": (lambda x: tf.stack([x, x], -1), (6,)),
    "depth_to_space": (lambda x: tf.nn.depth_to_space(x, 2), (6, 6, 4)),
    "space_to_depth": (lambda x: tf.nn.space_to_depth(x, 2), (6, 6, 4)),
    "pad": (lambda x: tf.pad(x, [[0, 0], [1, 1]]), (6,)),
    "slice": (lambda x: x[:, 1:], (6,)),
    "gather": (lambda x: tf.gather(x, tf.argmax(x, -1), axis=1), (6,)),
    "broadcast": (lambda x: tf.broadcast_to(x, [3, 6]), (6,)),
}
"""Calls without options, for operators that have defaults."""


FROM_SHAPES = {"affine", "contract"}
"""Operators of calls with options that depend on the number of axes."""


@pytest.mark.parametrize(
    "name", [op.name for op in ROWS if op.defaults and op.name not in FROM_SHAPES]
)
def test_defaults_are_the_options_of_a_plain_call(name):
    build, shape = PLAIN[name]
    *_, call = read_model(build_model(shape, build)).calls
    op, attributes, reason = match(call)
    assert op is not None, reason
    assert op.name == name
    for option, value in op.defaults.items():
        of_plain = attributes[option]
        is_alike = of_plain == value or of_plain == (value, value)  # Of both axes of images.
        assert value is None or is_alike, option


def test_a_layer_with_a_weight_is_an_operator():
    x = keras.Input((6,))
    norm = keras.layers.BatchNormalization()
    model = keras.Model(x, norm(Product(name="product")(x)))
    with keras_qat.register_op(Product, "dense", weights={"kernel": (-1,)}):
        op, _, reason = match(read_model(model).calls[0])
        assert op is not None, reason
        assert op.name == "dense"
        assert not keras_qat.plan(model).float_layers
