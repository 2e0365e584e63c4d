"""Recurrent layers behind an Embedding whose padding is masked: all steps are one layer."""

from __future__ import annotations

import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from tests.networks.forms.form import Form
from tests.networks.forms.recurrent import WORDS, masked

layers = keras.layers


@pytest.mark.legacy
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [layers.GRU, layers.LSTM, layers.SimpleRNN])
def test_masked_steps_are_one_layer(kind):
    model = Form(masked(kind, False, True), (WORDS,)).model()
    assert len(keras_qat.quantize_model(model, strict=True).layers) <= 10
