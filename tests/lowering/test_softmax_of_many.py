"""Tests an inner softmax of so many values that 8 bits cannot represent their mean."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import KERNELS, assert_kept, export
from tests.helpers import images, keras, layers, quantize_on
from tests.networks.small import functional

SHAPE = (24, 24, 2)
"""Shape of images of 576 pixels. Their exponentials add up to more than 512 if nearly equal."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("softmax", [tf.nn.softmax, layers.Softmax(), layers.Activation("softmax")])
def test_nearly_equal_scores_keep_their_shares(softmax, kernels, tmp_path):
    """The 8-bit reference kernel crashed."""
    model = functional(SHAPE, build=lambda x: softmax(tf.reshape(x, [-1, 1152])) * x[:, 0, :1, 0])
    x = np.abs(0.1 * images(8, SHAPE))
    qat = keras_qat.quantize_model(model, strict=True)
    qat.kernels = kernels
    keras_qat.calibrate(qat, x)
    expected = np.asarray(model(x))
    assert np.std(qat(x) - expected) < 0.05 * np.std(expected)
    assert_kept(qat, x, tmp_path)


def test_outputs_have_the_steps_that_runtimes_know():
    exported = export(functional((600,), build=layers.Softmax()), images(8, (600,)))
    assert exported.operations == ["SOFTMAX"]


@pytest.mark.parametrize("kernels", ["reference", "tflm"])
def test_outputs_that_would_end_the_process_are_an_error(kernels):
    """`verify` crashed on nearly equal classes, as before training."""
    if kernels == "tflm":
        pytest.importorskip("tflite_micro")
    x = images(4, (600,))
    qat = quantize_on(functional((600,), build=layers.Softmax()), 8 * x)
    contents = keras_qat.export_tflite(qat, batch_size=1)
    assert keras_qat.verify(qat, contents, 8 * x, kernels=kernels).identical == 1
    with pytest.raises(ValueError, match="600 scores of an example are nearly equal"):
        keras_qat.verify(qat, contents, 0.01 * x, kernels=kernels)


def pooled(x):
    """Computes the mean of 100 steps, weighted by their scores."""
    steps = layers.Conv1D(8, 3, padding="same", activation="relu")(x)
    shares = layers.Softmax(axis=1)(layers.Dense(1)(layers.Dense(8, "tanh")(steps)))
    return layers.Dense(2)(tf.reduce_sum(shares * steps, 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", [None, "edgetpu"])
def test_some_numbers_have_16_bits_where_they_take_no_time(target, tmp_path):
    """The numbers have 8 bits if the device would compute all later operators on its CPU."""
    keras.utils.set_random_seed(1)
    model, x = functional((100, 4), build=pooled), images(32, (100, 4))
    qat = quantize_on(model, x, target=target)
    expected = np.asarray(model(x))
    noise = np.std(qat(x) - expected, 0) / np.std(expected, 0)
    assert noise.max() > 0.1 if target else noise.max() < 0.06
    assert_kept(qat, x, tmp_path)
    stripped = keras_qat.strip_quantization(qat)
    np.testing.assert_allclose(stripped(x), expected, atol=1e-5)
