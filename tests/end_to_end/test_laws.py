"""Laws of arithmetic that integers keep exactly: equal codes from models that must be equal."""

import functools

import numpy as np
import pytest

import keras_qat
from tests.comparison import RUNNABLE
from tests.helpers import images, keras, layers, observe, rng

X = images(8, (6, 6, 3))
CHANNELS = 5
FACTORS = (8.0, 2.0**-5)


def weights():
    numbers = rng(3)
    return {
        "first": [numbers.normal(size=(3, 3, 3, CHANNELS)), numbers.normal(size=CHANNELS)],
        "second": [numbers.normal(size=(1, 1, CHANNELS, 4)), numbers.normal(size=4)],
        "logits": [numbers.normal(size=(4, 3)), numbers.normal(size=3)],
    }


def unchanged():
    return X, weights()


def channels_in_another_order():
    given, order = weights(), rng(0).permutation(CHANNELS)
    kernel, bias = given["first"]
    after, *rest = given["second"]
    other = given | {"first": [kernel[..., order], bias[order]]}
    return X, other | {"second": [after[:, :, order], *rest]}


def channels_of_zeros():
    given = weights()
    kernel, bias = given["first"]
    x = np.concatenate([X, np.zeros_like(X[..., :2])], -1)
    return x, given | {"first": [np.concatenate([kernel, kernel[:, :, :2] / 2], 2), bias]}


def times(factor):
    """Inputs and biases times a power of two."""
    return X * factor, {name: [kernel, bias * factor] for name, (kernel, bias) in weights().items()}


@functools.cache
def network(change, *args):
    """Inputs and a network whose ranges are those of these inputs."""
    x, given = change(*args)
    image = keras.Input(x.shape[1:])
    y = layers.Conv2D(CHANNELS, 3, padding="same", activation="relu", name="first")(image)
    y = layers.Conv2D(4, 1, name="second")(layers.MaxPooling2D()(y))
    y = layers.GlobalAveragePooling2D()(layers.Add()([y, layers.ReLU()(y)]))
    model = keras.Model(image, layers.Dense(3, name="logits")(y))
    for name, arrays in given.items():
        model.get_layer(name).set_weights(arrays)
    return x, observe(keras_qat.quantize_model(model), x)


def outputs(kernels, change, *args):
    x, qat = network(change, *args)
    (output,) = keras_qat.simulate(qat, x, kernels).outputs.values()
    assert len(np.unique(output.codes)) > 10
    return output


@pytest.mark.parametrize("kernels", RUNNABLE)
class TestLaws:
    @pytest.mark.parametrize("change", [channels_in_another_order, channels_of_zeros])
    def test_channels(self, kernels, change):
        expected = outputs(kernels, unchanged).codes
        np.testing.assert_array_equal(outputs(kernels, change).codes, expected)

    @pytest.mark.parametrize("factor", FACTORS)
    def test_inputs_and_biases_times_a_power_of_two(self, kernels, factor):
        expected, output = outputs(kernels, unchanged), outputs(kernels, times, factor)
        np.testing.assert_array_equal(output.codes, expected.codes)
        assert output.scale == expected.scale * np.float32(factor)

    def test_a_layer_twice(self, kernels):
        """Two layers of equal weights give equal codes in one model, side by side."""
        qat = side_by_side()
        both = keras_qat.simulate(qat, X, kernels).outputs["both"].codes
        np.testing.assert_array_equal(both[..., :CHANNELS], both[..., CHANNELS:])


@functools.cache
def side_by_side():
    image = keras.Input((6, 6, 3))
    branches = [layers.Conv2D(CHANNELS, 3, name=f"branch_{i}")(image) for i in range(2)]
    model = keras.Model(image, layers.Concatenate(name="both")(branches))
    for i in range(2):
        model.get_layer(f"branch_{i}").set_weights(weights()["first"])
    return observe(keras_qat.quantize_model(model), X)
