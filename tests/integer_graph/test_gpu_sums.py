"""Tests on the CPU how sums are computed on a GPU."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.ops import conv, weighted_sums
from tests.helpers import keras, layers, quantize_on, rng


@pytest.fixture
def asked_for_a_gpu(monkeypatch):
    """Pretends that there is a GPU, and records whether the code asks for one."""
    asked = []
    monkeypatch.setattr(weighted_sums, "has_gpu", lambda: asked.append(1) or True)
    yield
    assert asked


@pytest.mark.sample(1)
@pytest.mark.parametrize("layer", [layers.Conv2D(4, 3), layers.Conv2DTranspose(4, 3)])
def test_wide_convolutions_of_a_model(layer, asked_for_a_gpu):
    image = keras.Input((6, 6, 4))
    x = layers.Conv2D(5, 1)(layers.DepthwiseConv2D(3)(layer(image)))
    x_train = rng().normal(size=(8, 6, 6, 4)).astype(np.float32)
    qat = quantize_on(keras.Model(image, x), x_train)
    tflite = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
    np.testing.assert_array_equal(qat.predict(x_train, verbose=0), tflite.predict(x_train))


@pytest.mark.sample(12)
@pytest.mark.parametrize("length", [9, 10, None])
@pytest.mark.parametrize("padding", ["same", "valid", "causal"])
@pytest.mark.parametrize(
    ("strides", "dilation"), [((1, 1), (1, 1)), ((2, 3), (1, 1)), ((1, 1), (2, 2))]
)
@pytest.mark.parametrize("size", [(1, 2), (3, 2), (5, 5)])
def test_convolutions_as_products_of_matrices(length, padding, strides, dilation, size):
    """Includes sequences with causal padding."""
    if padding == "causal":
        strides, dilation, size = strides[1:], dilation[1:], size[1:]
    attributes = {"strides": strides, "padding": padding, "dilation": dilation}
    numbers = rng(3)
    x = tf.constant(numbers.integers(-255, 256, (2, *[19, 11][: len(size)], 3)), tf.float32)
    kernel = tf.constant(numbers.integers(-127, 128, (*size, 3, 4)), tf.float32)
    as_matrices = tf.function(
        lambda x: conv.convolve_as_matrices(attributes, x, kernel),
        input_signature=[tf.TensorSpec((None, *[length or None] * len(size), 3))],
        autograph=False,
    )
    x = x if length is None else x[(slice(None), *[slice(length)] * len(size))]
    np.testing.assert_array_equal(as_matrices(x), conv.convolve(attributes, x, kernel))
