"""Means of 16-bit values that are so many that their sum does not fit into 32 bits."""

import numpy as np
import pytest

import keras_qat
from keras_qat.ops.mean import MOST_WIDE
from tests.comparison import RUNNABLE
from tests.helpers import build_model, layers
from tests.ops.harness import assert_same, make_node, random_inputs
from tests.ops.test_movement import calls_of

SIZES = {(256, 256, 1): True, (260, 260, 1): False, (MOST_WIDE + 1, 1, 1): False}


@pytest.mark.parametrize("shape", SIZES)
def test_16_bit_means_of_too_many_values_are_in_float(shape):
    model = build_model(shape, layers.GlobalAveragePooling2D(name="mean"))
    reason = keras_qat.plan(model, "int16x8").float_layers.get("mean", "")
    assert (not reason) == SIZES[shape]
    assert SIZES[shape] or reason == "no int16 kernel for GlobalAveragePooling2D"
    assert not keras_qat.plan(model).float_layers


def test_16_bit_means_of_many_values():
    call = calls_of(layers.GlobalAveragePooling2D(), (256, 256, 1))[-1]
    node = make_node(call, 16, np.random.default_rng(0))
    ((name, codes),) = random_inputs(node, np.random.default_rng(1)).items()
    codes[0], codes[1] = -32768, 32767
    for family in RUNNABLE:
        assert_same(node, {name: codes}, family)
