"""Bidirectional as two recurrent layers and a merge: files, predictions and simulation."""

from __future__ import annotations

from typing import Any

import keras_qat
from keras_qat.keras2.backend import keras
from tests.networks.small import functional

layers = keras.layers

SHAPE = (3, 4)


def lstm(**options: Any) -> Any:
    return layers.LSTM(3, **options)


def test_names_are_those_of_the_layer_and_nothing_stays_in_float():
    plan = keras_qat.plan(functional(SHAPE, build=layers.Bidirectional(lstm(), name="both")))
    assert not plan.float_layers
    names = {row.tensor for row in plan.rows if row.role == "activation"}
    assert names == {"both_forward", "both_backward", "both"}
