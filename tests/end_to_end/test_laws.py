"""Laws of arithmetic that integers keep exactly: equal codes from models that must be equal."""

from __future__ import annotations

import numpy as np
import pytest

import keras_qat
from keras_qat.frontend.keras2.backend import keras
from tests.comparison import RUNNABLE
from tests.helpers import images, observe, rng

layers = keras.layers

X = images(8, (6, 6, 3))
CHANNELS = 5


def weights():
    numbers = rng(3)
    return {
        "first": [numbers.normal(size=(3, 3, 3, CHANNELS)), numbers.normal(size=CHANNELS)],
        "second": [numbers.normal(size=(1, 1, CHANNELS, 4)), numbers.normal(size=4)],
        "logits": [numbers.normal(size=(4, 3)), numbers.normal(size=3)],
    }


def codes(x, given, kernels, inputs=3):
    """The codes of a network with these weights, whose ranges are those of these inputs."""
    image = keras.Input((6, 6, inputs))
    y = layers.Conv2D(CHANNELS, 3, padding="same", activation="relu", name="first")(image)
    y = layers.Conv2D(4, 1, name="second")(layers.MaxPooling2D()(y))
    y = layers.GlobalAveragePooling2D()(layers.Add()([y, layers.ReLU()(y)]))
    model = keras.Model(image, layers.Dense(3, name="logits")(y))
    for name, arrays in given.items():
        model.get_layer(name).set_weights(arrays)
    qat = observe(keras_qat.quantize_model(model), x)
    (output,) = keras_qat.simulate(qat, x, kernels).outputs.values()
    assert len(np.unique(output.codes)) > 10
    return output


@pytest.mark.parametrize("kernels", RUNNABLE)
class TestLaws:
    def test_channels_in_another_order(self, kernels):
        given, order = weights(), rng(0).permutation(CHANNELS)
        kernel, bias = given["first"]
        after, *rest = given["second"]
        other = given | {"first": [kernel[..., order], bias[order]]}
        other["second"] = [after[:, :, order], *rest]
        expected = codes(X, given, kernels).codes
        np.testing.assert_array_equal(codes(X, other, kernels).codes, expected)

    def test_channels_of_zeros(self, kernels):
        given = weights()
        kernel, bias = given["first"]
        other = given | {"first": [np.concatenate([kernel, kernel[:, :, :2] / 2], 2), bias]}
        x = np.concatenate([X, np.zeros_like(X[..., :2])], -1)
        expected = codes(X, given, kernels).codes
        np.testing.assert_array_equal(codes(x, other, kernels, 5).codes, expected)

    @pytest.mark.parametrize("factor", [8.0, 2.0**-5])
    def test_inputs_and_biases_times_a_power_of_two(self, kernels, factor):
        given = weights()
        other = {name: [kernel, bias * factor] for name, (kernel, bias) in given.items()}
        expected, output = codes(X, given, kernels), codes(X * factor, other, kernels)
        np.testing.assert_array_equal(output.codes, expected.codes)
        assert output.scale == expected.scale * np.float32(factor)

    def test_a_layer_twice(self, kernels):
        """Two layers of equal weights give equal codes in one model, side by side."""
        image = keras.Input((6, 6, 3))
        branches = [layers.Conv2D(CHANNELS, 3, name=f"branch_{i}")(image) for i in range(2)]
        model = keras.Model(image, layers.Concatenate(name="both")(branches))
        for i in range(2):
            model.get_layer(f"branch_{i}").set_weights(weights()["first"])
        qat = observe(keras_qat.quantize_model(model), X)
        both = keras_qat.simulate(qat, X, kernels).outputs["both"].codes
        np.testing.assert_array_equal(both[..., :CHANNELS], both[..., CHANNELS:])
