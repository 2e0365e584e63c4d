"""Who quantizes a file's inputs may round as they like: usual data is halfway between no codes."""

from __future__ import annotations

import numpy as np
import pytest

import keras_qat
from keras_qat.arithmetic.qparams import QuantParams
from keras_qat.interpreter import TFLiteModel
from keras_qat.resolved.resolve import resolve
from tests.comparison import KERNELS
from tests.helpers import observe, rng, scramble
from tests.networks.small import functional, layers

PIXELS = np.arange(256)
NORMALIZED = {
    "x / 127.5 - 1": lambda pixels: pixels / 127.5 - 1,
    "x / 255": lambda pixels: pixels / 255,
    "raw": lambda pixels: pixels,
    "(x - 127.5) / 64": lambda pixels: (pixels - 127.5) / 64,
}


def network():
    def build(x):
        x = layers.Conv2D(8, 3, activation="relu")(x)
        return layers.Dense(5)(layers.Flatten()(layers.Conv2D(8, 3)(x)))

    return scramble(functional((10, 10, 3), build=build))


@pytest.fixture(scope="module", params=NORMALIZED)
def fed(request):
    """A model that observed normalized pixels, and those."""
    pixels = rng(3).integers(0, 256, (48, 10, 10, 3))
    pixels[:, :8, :8, 0].reshape(-1)[:256] = PIXELS
    pixels[0, 0, 0], pixels[:, 1, 1, 0], pixels[:, 1, 1, 1] = 7, 0, 255
    x = NORMALIZED[request.param](pixels).astype(np.float32)
    return observe(keras_qat.quantize_model(network()), x), x


def params_of(qat) -> QuantParams:
    (image,) = resolve(qat).inputs.values()
    return image.params


def test_no_pixel_is_halfway_between_two_codes(fed):
    qat, x = fed
    steps = np.unique(x.astype(np.float64)) / params_of(qat).scale
    assert np.min(np.abs(steps - np.floor(steps) - 0.5)) > 1e-3


def test_nor_is_the_mean_of_two_of_them(fed):
    qat, x = fed
    if x.min() == 0:
        pytest.skip("They are the codes of their range: half of one is halfway.")
    known = np.unique(x.astype(np.float64))
    steps = (known[1:] + known[:-1]) / 2 / params_of(qat).scale
    assert np.min(np.abs(steps - np.floor(steps) - 0.5)) > 1e-3


@pytest.mark.parametrize("rounded", [np.round, lambda x: np.floor(x + 0.5)], ids=["even", "up"])
def test_any_rounding_gives_the_codes_of_the_model(fed, rounded):
    qat, x = fed
    contents, params = keras_qat.export_tflite(qat), params_of(qat)
    codes = rounded(x / np.float32(params.scale)) + params.zero_point
    assert codes.min() >= -128 and codes.max() <= 127
    (name,) = TFLiteModel(contents).inputs
    for kernels in KERNELS:
        file = TFLiteModel(contents, kernels)
        (found,) = file.run({name: codes.astype(np.int8)}).values()
        (expected,) = keras_qat.simulate(qat, x, kernels).outputs.values()
        np.testing.assert_array_equal(found, expected.codes)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_file_in_float_gives_the_codes_of_the_model(fed, kernels):
    qat, x = fed
    file = TFLiteModel(keras_qat.export_tflite(qat, input_dtype="float32"), kernels)
    (found,) = file.run({next(iter(file.inputs)): x}).values()
    (expected,) = keras_qat.simulate(qat, x, kernels).outputs.values()
    np.testing.assert_array_equal(found, expected.codes)


def test_ranges_of_other_tensors_are_what_was_observed(fed):
    qat, x = fed
    first, *others = keras_qat.quantizers(qat)
    assert first.spec.off_ties
    width = x.max() - min(x.min(), 0)
    expected = x.max() + (width / 254 if x.min() < 0 else 0)
    assert first.maximum == pytest.approx(expected, rel=1e-6)
    assert not any(getattr(each.spec, "off_ties", False) for each in others)


@pytest.mark.parametrize(
    "recipe", ["int16x8", keras_qat.recipes.int8(activation_bits=4), "contrib"]
)
def test_other_recipes_are_as_they_were(recipe):
    qat = keras_qat.quantize_model(network(), recipe)
    assert not any(getattr(each.spec, "off_ties", False) for each in keras_qat.quantizers(qat))
