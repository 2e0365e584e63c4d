"""Every structure of `convolutional`: the integer simulation gives all of the file's codes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import keras_qat
from tests.comparison import KERNELS, assert_identical
from tests.helpers import observe, scramble
from tests.networks.convolutional import FAMILIES, family_inputs, family_model


@functools.cache
def exported(family: str) -> tuple[Any, list[np.ndarray], bytes]:
    """A family's quantized model, its inputs and its file: made once for all kernels."""
    inputs = family_inputs(family, count=64)
    qat = observe(keras_qat.quantize_model(scramble(family_model(family))), *inputs)
    return qat, inputs, keras_qat.export_tflite(qat)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_codes_are_those_of_the_file(family, kernels):
    qat, inputs, contents = exported(family)
    x = inputs if len(inputs) > 1 else inputs[0]
    assert assert_identical(qat, x, kernels, contents).float_layers == ()
