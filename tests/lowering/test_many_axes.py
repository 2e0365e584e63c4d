"""Slices and norms of more axes than kernels take."""

from __future__ import annotations

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_kept
from tests.helpers import images, scramble

layers = keras.layers
SIZES = 2, 3, 2, 1, 4
FORMS = {
    "two axes": lambda x: x[:, :, 1:, :, :, 1:3],
    "entries": lambda x: x[:, -1, 1, ..., 2],
    "backwards, and new axes": lambda x: x[:, None, :, ::-2, 0, ..., None],
    "nothing left out": lambda x: x[:, :, :, None],
    "of integers": lambda x: keras.backend.cast(x[:, :, 2], "float32"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_slices_in_integers(form, tmp_path):
    is_integer = form == "of integers"
    inputs = keras.Input(SIZES, dtype="int32" if is_integer else None)
    model = keras.Model(inputs, FORMS[form](inputs))
    x = np.round(9 * images(8, SIZES)).astype("int32") if is_integer else images(8, SIZES)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    np.testing.assert_allclose(qat(x), model(x), atol=0.02 * np.abs(x).max())
    assert_kept(qat, x, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "argument"), [("LayerNormalization", (-2, -1)), ("GroupNormalization", 2)]
)
def test_norms_in_integers(kind, argument, tmp_path):
    norm = getattr(layers, kind)(argument)
    inputs, x = keras.Input(SIZES), images(32, SIZES)
    model = scramble(keras.Model(inputs, norm(inputs)))
    recipe = keras_qat.recipes.int8().override(kind, quantize=True)
    qat = keras_qat.quantize_model(model, recipe, strict=True)
    keras_qat.calibrate(qat, x)
    in_float = model(x)
    noise = in_float - qat(x)
    assert 10 * np.log10(np.sum(in_float**2) / np.sum(noise**2)) > 25
    assert_kept(qat, x, tmp_path)
