"""Tests custom layers and TimeDistributed in models with unknown sizes."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import assert_in_integers
from tests.helpers import build_model, images, keras, layers, scramble

K = keras.backend


def boxes(features):
    """Computes the position of each cell as a share of (width, height), like code for YOLO."""
    grid = K.shape(features)[1:3]
    x, y = tf.meshgrid(tf.range(grid[1]), tf.range(grid[0]))
    cells = K.cast(K.stack([x, y], axis=-1), K.dtype(features))
    return (K.sigmoid(features) + cells) / K.cast(grid[::-1], K.dtype(features))


def up_like(tensors):
    """Resizes one image to the size of another, as in feature pyramids."""
    small, large = tensors
    return tf.image.resize(small, tf.shape(large)[1:3])


def model_of(function):
    inputs = keras.Input((None, None, 3))
    large = layers.Conv2D(2, 3, 1, "same")(inputs)
    small = layers.Conv2D(2, 3, 2, "same")(large)
    read = [small, large] if function is up_like else small
    return scramble(keras.Model(inputs, layers.Lambda(function)(read)))


@pytest.mark.parametrize("function", [boxes, up_like])
def test_sizes_stay_open(function):
    model = model_of(function)
    qat = keras_qat.quantize_model(model)
    keras_qat.set_quantization(qat, False)
    for shape in ((8, 12, 3), (6, 4, 3)):
        x = images(2, shape)
        np.testing.assert_allclose(qat(x), model(x), rtol=1e-4, atol=1e-5)


def test_sizes_that_the_caller_knows_are_in_integers(tmp_path):
    model = build_model((8, 12, 3), model_of(boxes))
    assert_in_integers(model, images(8, (8, 12, 3)), tmp_path)
