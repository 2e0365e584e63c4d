"""Every structure of `single_layers`: the integer simulation gives all of the file's codes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import KERNELS, assert_identical
from tests.helpers import observe, scramble
from tests.networks.single_layers import FAMILIES, family_inputs, family_model

TILE = {"moves": "repeat", "operations": "tile"}
"""Families -> the member with a TILE, of which the reference kernels have no current version."""


NO_ELU = ("elu", "reference")
"""The interpreter's reference kernels have none; those of microcontrollers do."""


@functools.cache
def exported(family: str, without: str = "") -> tuple[Any, list[np.ndarray], bytes]:
    """A family's quantized model, its inputs and its file: made once for all kernels."""
    inputs = family_inputs(family, count=64)
    model = scramble(family_model(family))
    named = zip(FAMILIES[family][1], model.outputs, strict=True)
    model = keras.Model(model.inputs, [output for name, output in named if name != without])
    qat = observe(keras_qat.quantize_model(model), *inputs)
    return qat, inputs, keras_qat.export_tflite(qat)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [(family, each) for family in FAMILIES for each in KERNELS if (family, each) != NO_ELU],
)
def test_codes_are_those_of_the_file(family, kernels):
    without = TILE.get(family, "") if kernels == "reference" else ""
    qat, inputs, contents = exported(family, without)
    x = inputs if len(inputs) > 1 else inputs[0]
    assert assert_identical(qat, x, kernels, contents).float_layers == ()
