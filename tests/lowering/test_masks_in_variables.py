"""Masks in variables that do not train count as constants."""

import pytest

import keras_qat
from tests.helpers import build_model
from tests.networks.forms.masks import HELD_MASKS, SHAPE, WITHIN, Attention


def test_another_mask_is_not_taken_for_the_one_before(monkeypatch):
    """The copy of a float model makes its masks anew, with the user's own code."""
    qat = keras_qat.quantize_model(build_model(SHAPE, Attention("truth")))
    monkeypatch.setitem(HELD_MASKS, "truth", (WITHIN[::-1], HELD_MASKS["truth"][1]))
    with pytest.raises(ValueError, match="Keras cannot copy the float model"):
        keras_qat.strip_quantization(qat)
