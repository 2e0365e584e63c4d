"""ConvLSTM in integers, unrolled: files, predictions and simulation, and what trains."""

from __future__ import annotations

import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import images, observe, scramble
from tests.networks.forms.cells_and_convolutions import SHAPES, tiny
from tests.networks.small import functional

layers = keras.layers


def test_ranges_inside_are_planned_and_named():
    plan = keras_qat.plan(functional(SHAPES[tiny], build=tiny))
    inside = [row.tensor for row in plan.rows if row.reason.startswith("inside")]
    parts = ("input_gates", "state_gates", "input_candidate", "state_candidate")
    assert inside == [f"conv_lstm/{part}" for part in parts]


SHAPE = SHAPES[tiny]


@pytest.mark.slow
def test_channels_first_in_float():
    x = images(8, SHAPE)
    model = scramble(functional(SHAPE, build=layers.ConvLSTM2D(2, 2, data_format="channels_first")))
    qat = observe(keras_qat.quantize_model(model), x)
    (output,) = keras_qat.verify(qat, keras_qat.export_tflite(qat), x).outputs
    assert output.max_difference <= 1


def test_states_that_are_kept_stay_in_float():
    x = keras.Input(SHAPE, batch_size=2)
    model = keras.Model(x, layers.ConvLSTM2D(2, 3, stateful=True)(x))
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert "its states are kept, given or read" in reason
