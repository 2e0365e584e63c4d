"""Tests files of models that train like `tf.contrib.quantize`, with ranges from no quantizer."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import KERNELS, assert_identical
from tests.helpers import images, keras, layers, observe, scramble


def network():
    """Returns a network with fixed ranges, ranges of moved inputs, and ranges of concatenations."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu6")(inputs)
    parts = [layers.Activation(name)(layers.Conv2D(3, 1)(x)) for name in ("sigmoid", "tanh")]
    x = layers.Concatenate()([layers.MaxPooling2D()(x), *map(layers.AveragePooling2D(), parts)])
    return keras.Model(inputs, layers.Softmax()(layers.Dense(3)(layers.Flatten()(x))))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", KERNELS)
def test_simulations_compute_what_files_do(kernels):
    x = images(16, (8, 8, 3))
    qat = observe(keras_qat.quantize_model(scramble(network()), "contrib"), x)
    contents = keras_qat.export_tflite(qat, input_range=(-4.0, 4.0))
    assert_identical(qat, x, kernels, contents, input_range=(-4.0, 4.0))


@pytest.mark.parametrize("narrow", [True, False])
def test_weights_of_files_are_those_that_training_multiplies(narrow):
    model = keras.Sequential([layers.Dense(4, input_shape=(6,))])
    kernel = np.linspace(-1.1, 1, 24, dtype=np.float32).reshape(6, 4)
    model.set_weights([kernel, np.zeros(4)])
    recipe = keras_qat.recipes.contrib(4, weight_narrow_range=narrow)
    qat = observe(keras_qat.quantize_model(model, recipe), images(8, (6,)))
    (node,) = keras_qat.resolve(qat, input_range=(-4.0, 4.0)).nodes
    expected = tf.quantization.fake_quant_with_min_max_args(kernel, -1.1, 1.0, 4, narrow)
    np.testing.assert_allclose(node.weights.q * node.weights.scale, expected, atol=1e-6)


def test_folded_layers_that_a_recipe_leaves_out_compute_in_float():
    x, data = keras.Input((8, 8, 4)), images(8, (8, 8, 4))
    folded = layers.BatchNormalization()(layers.Conv2D(3, 3, use_bias=False, name="first")(x))
    model = keras.Model(x, layers.ReLU()(layers.Conv2D(3, 3)(layers.ReLU()(folded))))
    recipe = keras_qat.recipes.contrib().override("first", quantize=False)
    qat = observe(keras_qat.quantize_model(scramble(model), recipe), data)
    graph = keras_qat.resolve(qat, input_range=(-4.0, 4.0))
    assert "quant_first: float (its weights are not quantized)" in str(graph)
    contents = keras_qat.export_tflite(qat, input_range=(-4.0, 4.0))
    assert_identical(qat, data, KERNELS[0], contents, input_range=(-4.0, 4.0))
