"""Tests files with pixel inputs on values between two pixels, which resizing produces."""

import warnings

import numpy as np
import pytest

import keras_qat
from tests.helpers import keras, layers, quantize_on, rng

PIXELS = rng(1).uniform(0, 250, (64, 6, 6, 3)).astype(np.float32)
MEAN, DEVIATION = np.float32([120, 110, 100]), np.float32([60, 50, 70])


def quantized(x, *first, recipe="int8"):
    keras.utils.set_random_seed(0)
    body = [*first, layers.Conv2D(8, 3), layers.Flatten(), layers.Dense(8)]
    qat = quantize_on(keras.Sequential([keras.Input((6, 6, 3), name="image"), *body]), x, recipe)
    return qat


def rescale(scale, offset):
    return lambda pixels: np.float32(pixels * scale + offset)


CASES = {
    "own Rescaling": ([layers.Rescaling(1 / 127.5, -1)], rescale(1, 0), None),
    "own Normalization": (
        [layers.Normalization(mean=MEAN, variance=DEVIATION**2)],
        rescale(1, 0),
        None,
    ),
    "scale": ([], rescale(1 / 255, 0), (1 / 255, 0)),
    "scale and offset": ([], rescale(1 / 127.5, -1), (1 / 127.5, -1)),
    "of each channel": (
        [],
        rescale(1 / DEVIATION, -MEAN / DEVIATION),
        (1 / DEVIATION, -MEAN / DEVIATION),
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_file_and_model_are_given_the_same_pixels(name):
    first, prepare, rescaling = CASES[name]
    x = prepare(PIXELS)
    qat = quantized(x, *first)
    contents = keras_qat.export_tflite(qat, input_dtype="uint8", rescaling=rescaling)
    report = keras_qat.verify(qat, contents, x, per_layer=True)
    assert report.identical == 1 and report.is_good
    assert all(tensor.agrees for tensor in report.tensors)
    (note,) = report.notes
    assert "Input 'image' of the file accepts integer pixels" in note and "nearest pixels" in note
    whole = keras_qat.verify(qat, contents, prepare(np.round(PIXELS)))
    assert whole.identical == 1 and not whole.notes


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"input_dtype": "float32"}, {"input_dtype": "uint8"}])
def test_files_that_round_as_the_model_are_given_all_values(options):
    x = np.float32(PIXELS / 250)
    qat = quantized(x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat, **options), x)
    assert report.identical == 1 and not report.notes


def test_values_far_from_pixels_are_warned_of():
    """For example, the user passes pixels from 0 to 255 to a model with inputs from 0 to 1."""
    qat = quantized(np.float32(PIXELS / 255))
    contents = keras_qat.export_tflite(qat, input_dtype="uint8", rescaling=(1 / 255, 0))
    with pytest.warns(UserWarning, match="100% of the values of input 'image' are outside"):
        report = keras_qat.verify(qat, contents, PIXELS)
    assert not report.is_good
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keras_qat.verify(qat, contents, np.float32(1.1 * PIXELS / 255))
