"""Tests that oscillating weights come to rest, as in Nagel et al. 2022."""

import numpy as np
import pytest

import keras_qat
from keras_qat import recipes
from keras_qat.callbacks import FreezeOscillations
from keras_qat.training.callbacks import Oscillations
from keras_qat.training.weight_limits import list_channel_weights
from tests.helpers import keras
from tests.networks.small import functional, layers

pytestmark = pytest.mark.legacy


def kernel_of(bits: int):
    """Returns a kernel of one channel with integer levels. Its first weight is the largest."""
    model = functional((5,), build=layers.Dense(1, name="y"))
    qat = keras_qat.quantize_model(model, recipes.int8(bits))
    ((kernel, quantizer),) = list_channel_weights(qat)
    return kernel, quantizer


def test_a_weight_that_turns_rests_where_it_was_most():
    kernel, quantizer = kernel_of(3)
    others = [1.2, -2.3, 0.0]
    kernel.assign(np.reshape([3.0, 0.4, *others], (5, 1)))
    watched = Oscillations(kernel, quantizer, momentum=0.1)
    codes, turned = [0, 1, 0, 1, 1, 1, 0, 1], [0, 0, 1, 1, 0, 0, 1, 1]
    frequency, mean = 0.0, 0.0
    for code, turn in zip(codes, turned, strict=True):
        assert frequency < 0.25
        kernel.assign(np.reshape([3.0, 0.4 + 0.2 * code, *others], (5, 1)))
        watched.update(0.25)
        frequency += 0.1 * (turn - frequency)
        mean += 0.1 * (code - mean)
    assert frequency > 0.25
    np.testing.assert_array_equal(watched.frozen.numpy().ravel(), [0, 1, 0, 0, 0])
    np.testing.assert_allclose(kernel.numpy().ravel(), [3, np.round(mean), *others], 1e-6)
    kernel.assign_add([[-0.3], [0.7], [-0.3], [0], [0]])  # The scale is then 0.9.
    watched.update(0.25)
    result = kernel.numpy().ravel()
    np.testing.assert_allclose(result, [2.7, 0.9 * np.round(mean), 0.9, -2.3, 0], 1e-6, 1e-7)


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="use values between 0 and 1"):
        FreezeOscillations((0.0, 0.1))
    model = functional((6,), build=layers.Dense(3))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="not quantization-aware"):
        model.fit(np.zeros((2, 6)), np.zeros((2, 3)), verbose=0, callbacks=[FreezeOscillations()])
    assert isinstance(FreezeOscillations(), keras.callbacks.Callback)
