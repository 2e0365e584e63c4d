"""Custom layers as weighted operators."""

from __future__ import annotations

import pytest
import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.ops.trace_weighted import weighted_op_of

pytestmark = pytest.mark.legacy
layers = keras.layers


class Custom(keras.layers.Layer):
    """A layer that computes a function of its input, its kernel and its bias."""

    def __init__(self, function, shape, bias=None):
        super().__init__()
        self.function, self.shape, self.size = function, shape, bias

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", self.shape)
        self.offset = None if self.size is None else self.add_weight("offset", [self.size])
        super().build(input_shape)

    def call(self, inputs):
        return self.function(inputs, self.kernel, self.offset)


def traced(layer, shape, weight="kernel"):
    layer.build((None, *shape))
    return weighted_op_of(layer, weight, (None, *shape))


DENSE = {
    "matmul": (lambda x, k, b: tf.matmul(x, k), (5,), None),
    "with bias": (lambda x, k, b: tf.matmul(x, k) + b, (5,), 7),
    "bias_add": (lambda x, k, b: tf.nn.bias_add(tf.matmul(x, k), b), (5,), 7),
    "rank 3": (lambda x, k, b: tf.matmul(x, k) + b, (3, 5), 7),
    "tensordot": (lambda x, k, b: tf.tensordot(x, k, [[3], [0]]) + b, (2, 3, 5), 7),
    "reshaped": (
        lambda x, k, b: tf.reshape(tf.matmul(tf.reshape(x, [-1, 5]), k), [-1, 3, 7]) + b,
        (3, 5),
        7,
    ),
    "open": (lambda x, k, b: tf.matmul(x, k), (None, 5), None),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(name):
    function, shape, bias = DENSE[name]
    result = traced(Custom(function, (5, 7), bias), shape)
    assert result.op.name == "dense"
    assert result.bias == (None if bias is None else "offset")


def test_convolutions():
    def conv(x, k, b):
        return tf.nn.conv2d(x, k, (2, 1), "SAME") + b

    result = traced(Custom(conv, (3, 3, 4, 6), 6), (8, 8, 4))
    assert (result.op.name, result.bias) == ("conv", "offset")
    assert result.attributes["strides"] == (2, 1)
    assert result.attributes["padding"] == "same"

    def dilated(x, k, b):
        return tf.nn.conv2d(x, k, 1, "VALID", dilations=2)

    result = traced(Custom(dilated, (3, 3, 2, 6)), (None, None, 4))
    assert (result.op.name, result.attributes["dilation"]) == ("conv", (2, 2))

    def depthwise(x, k, b):
        return tf.nn.depthwise_conv2d(x, k, [1, 2, 2, 1], "SAME")

    result = traced(Custom(depthwise, (3, 3, 4, 2)), (8, 8, 4))
    assert (result.op.name, result.attributes["strides"]) == ("depthwise_conv", (2, 2))


@pytest.mark.parametrize(
    ("layer", "shape", "row", "weight", "attributes"),
    [
        (lambda: layers.Dense(3), (4, 5), "dense", "kernel", {}),
        (
            lambda: layers.Conv1D(3, 3, padding="causal", dilation_rate=2),
            (12, 4),
            "conv",
            "kernel",
            {"padding": "causal", "dilation": (2,)},
        ),
        (
            lambda: layers.Conv2D(4, 3, groups=2, dilation_rate=2, padding="same"),
            (9, 8, 4),
            "conv",
            "kernel",
            {"padding": "same", "dilation": (2, 2)},
        ),
        (
            lambda: layers.DepthwiseConv2D(3, dilation_rate=3, padding="same"),
            (9, 8, 4),
            "depthwise_conv",
            "depthwise_kernel",
            {"padding": "same", "dilation": (3, 3)},
        ),
        (
            lambda: layers.DepthwiseConv1D(3, strides=2),
            (9, 4),
            "depthwise_conv",
            "depthwise_kernel",
            {"padding": "valid", "strides": (2,)},
        ),
        (
            lambda: layers.Conv2DTranspose(3, 3, strides=2, padding="same", output_padding=0),
            (5, 6, 4),
            "transpose_conv",
            "kernel",
            {"strides": (2, 2), "padding": "same", "output_padding": (0, 0)},
        ),
        (
            lambda: layers.Conv1DTranspose(3, 3, strides=3),
            (5, 4),
            "transpose_conv",
            "kernel",
            {"strides": (3,), "output_padding": None},
        ),
    ],
)
def test_layers_of_keras_are_found_by_what_they_compute(layer, shape, row, weight, attributes):
    result = traced(layer(), shape, weight)
    assert (result.op.name, result.bias) == (row, "bias")
    assert {name: result.attributes[name] for name in attributes} == attributes


REFUSED = {
    "activation": (lambda x, k, b: tf.nn.relu(tf.matmul(x, k)), "alone"),
    "factor": (lambda x, k, b: tf.matmul(x, k) * 2.0, "alone"),
    "minus": (lambda x, k, b: tf.matmul(x, k) - b, "alone"),
    "transposed": (lambda x, k, b: tf.matmul(x, k, transpose_b=True), "alone"),
    "twice": (lambda x, k, b: tf.matmul(tf.matmul(x, k), k), "2 products"),
    "none": (lambda x, k, b: x, "no products"),
    "wrong": (lambda x, k, b: tf.matmul(x, x), "cannot be traced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    function, reason = REFUSED[name]
    assert reason in traced(Custom(function, (5, 5), 5 if name == "minus" else None), (5,))


def test_a_kernel_of_another_shape():
    function = lambda x, k, b: tf.matmul(x, k, transpose_b=True)  # noqa: E731
    assert "alone" in traced(Custom(function, (7, 5)), (5,))


def test_more_weights():
    class Three(Custom):
        def build(self, input_shape):
            self.gain = self.add_weight("gain", [5])
            super().build(input_shape)

    layer = Three(lambda x, k, b: tf.matmul(x, k) + b, (5, 5), 5)
    assert "more weights" in traced(layer, (5,))


def test_a_bias_that_is_in_a_list():
    """Its first value, zeros, would be taken for none."""

    class Listed(Custom):
        def build(self, input_shape):
            super().build(input_shape)
            self.biases = [self.add_weight("bias", [5], initializer="zeros")]

    layer = Listed(lambda x, k, b: tf.matmul(x, k), (5, 5))
    layer.call = lambda x: tf.matmul(x, layer.kernel) + layer.biases[0]
    assert "more weights" in traced(layer, (5,))
