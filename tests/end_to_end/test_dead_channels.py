"""Tests channels that training has switched off, with weights close to zero, unlike their bias.

In units of input scale x weight scale, the bias would not fit 32 bits, as runtimes require.
"""

import numpy as np
import pytest

import keras_qat
from tests.comparison import export
from tests.helpers import images, keras
from tests.networks.small import functional, layers

LAYERS = {
    "conv": lambda: layers.Conv2D(4, 3, name="layer"),
    "depthwise": lambda: layers.DepthwiseConv2D(3, depth_multiplier=2, name="layer"),
    "dense": lambda: layers.Dense(4, name="layer"),
    "transposed": lambda: layers.Conv2DTranspose(4, 3, name="layer"),
    "einsum": lambda: layers.EinsumDense(
        "abcd,de->abce", (None, None, 4), bias_axes="e", name="layer"
    ),
    "norm": lambda: layers.BatchNormalization(name="layer"),
}


def kill(layer, channel, size):
    """Multiplies the weights of one channel by `size`, or all weights if they share a range."""
    weights = layer.get_weights()
    single = isinstance(layer, (layers.Conv2DTranspose, layers.EinsumDense))
    if isinstance(layer, layers.DepthwiseConv2D):
        weights[0][:, :, 0, channel] *= size
    else:
        weights[0][... if single else (..., channel)] *= size
    weights[1][:] = np.linspace(-0.5, 1.0, weights[1].size)
    layer.set_weights(weights)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "bits"), [(1e-5, 8), (1e-20, 4)])
@pytest.mark.parametrize("kind", LAYERS)
def test_bias_of_a_dead_channel_is_exported(kind, size, bits):
    model = functional(
        (6, 6, 4), build=lambda x: layers.Conv2D(3, 1, name="out")(LAYERS[kind]()(x))
    )
    kill(model.get_layer("layer"), 1, size)
    x = images(32, (6, 6, 4))
    recipe = keras_qat.recipes.int8(weight_bits=bits)
    report = export(model, x, recipe=recipe, per_layer=True).report
    (result,) = [tensor for tensor in report.tensors if tensor.name == "layer"]
    assert result.fed.max_difference <= 1
    # The kernel for transposed convolutions is TFLite's, which rounds twice.
    assert result.fed.identical >= (0.99 if kind == "transposed" else 0.999)


def test_folded_batch_norm_with_a_tiny_gamma():
    def build(x):
        x = layers.Conv2D(4, 3, use_bias=False, name="layer")(x)
        return layers.Conv2D(3, 1)(layers.BatchNormalization(name="norm")(x))

    model = functional((6, 6, 4), build=build)
    norm = model.get_layer("norm")
    norm.gamma.assign([1e-9, 1.0, -1e-6, 0.0])
    norm.beta.assign([1.0, 0.1, -0.6, 0.4])
    report = export(model, images(32, (6, 6, 4)), per_layer=True).report
    assert report.differing == ()


@pytest.mark.legacy
@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["int8", "int16x8", "contrib"])
def test_the_rest_of_a_model_with_a_dead_relu_is_exported(recipe):
    """The quantizer of the ReLU has only observed zeros."""
    keras.utils.set_random_seed(1)
    x = keras.Input((6,))
    off = keras.initializers.Constant(-100.0)
    dead = layers.Dense(3, activation="relu", bias_initializer=off)(x)
    y = layers.Dense(4)(layers.Concatenate()([layers.Dense(5)(x), layers.Dense(2)(dead)]))
    exported = export(keras.Model(x, y), images(64, (6,)), recipe=recipe)
    assert exported.report.identical >= (0.9 if recipe == "contrib" else 1)
