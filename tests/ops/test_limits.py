"""Tests both sides of each scale at which files change: their operators and results."""

import dataclasses

import numpy as np
import pytest

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.ops.registry import op_named
from keras_qat.tflite.interpreter import FileInterpreter
from tests.comparison import KERNELS
from tests.ops.harness import assert_same, file_of, node_of, random_inputs


def above(number):
    return float(np.nextafter(np.float32(number), np.float32(np.inf)))


def below(number):
    return float(np.nextafter(np.float32(number), np.float32(0)))


FINE, ONE = 2.0**-10, 1.0
GATE = 3 / 256
"""128 steps of hard swish's gate."""

LIMITS = [
    ("add", 8, (2.0**7, ONE, ONE), ["ADD"]),
    ("add", 8, (ONE, above(2.0**7), ONE), ["ADD", "QUANTIZE"]),
    ("add", 8, (2.0**7, FINE, ONE), ["ADD"]),
    ("add", 8, (2.0**7, below(FINE), ONE), ["ADD", "QUANTIZE"]),
    ("subtract", 8, (below(FINE), 2.0**5, ONE), ["SUB"]),
    ("subtract", 8, (below(FINE), above(2.0**5), ONE), ["SUB", "QUANTIZE"]),
    ("add", 16, (2.0**13, ONE, ONE), ["ADD"]),
    ("add", 16, (ONE, above(2.0**13), ONE), ["ADD", "QUANTIZE"]),
    ("multiply", 8, (2.0**3, 2.0**4, ONE), ["MUL"]),
    ("multiply", 8, (2.0**3, above(2.0**4), ONE), ["MUL", "QUANTIZE"]),
    ("softmax", 8, (2.0**-25,), ["SOFTMAX"]),
    ("softmax", 8, (below(2.0**-25),), ["QUANTIZE", "SOFTMAX"]),
    ("sigmoid", 16, (4.0,), ["LOGISTIC"]),
    ("sigmoid", 16, (above(4.0),), ["QUANTIZE", "LOGISTIC"]),
    ("tanh", 16, (4.0,), ["TANH"]),
    ("tanh", 16, (above(4.0),), ["QUANTIZE", "TANH"]),
    ("hard_swish", 8, (below(128 * 2.0**-7), 2.0**-7), ["HARD_SWISH"]),
    ("hard_swish", 8, (128 * 2.0**-7, 2.0**-7), ["CAST", "ADD", "GATHER"]),
    ("hard_swish", 8, (2.0**-12, 2.0**-3), ["HARD_SWISH"]),
    ("hard_swish", 8, (below(2.0**-12), 2.0**-3), ["CAST", "ADD", "GATHER"]),
    ("hard_swish", 8, (GATE * 2.0**-16, 2.0**-20), ["HARD_SWISH"]),
    ("hard_swish", 8, (below(GATE * 2.0**-16), 2.0**-20), ["CAST", "ADD", "GATHER"]),
    ("hard_swish", 8, (below(GATE * 2.0**30), 2.0**20), ["HARD_SWISH"]),
    ("hard_swish", 8, (GATE * 2.0**30, 2.0**20), ["CAST", "ADD", "GATHER"]),
    ("relu", 8, (ONE, 6 / 255), ["RELU"]),
    ("relu", 8, (ONE, 6 / 254.5), ["RELU", "MINIMUM"]),
    ("mask_scores", 8, (2.0**-8, ONE), ["QUANTIZE", "SELECT_V2"]),
    ("mask_scores", 8, (below(2.0**-8), ONE), ["QUANTIZE", "QUANTIZE", "SELECT_V2"]),
]
"""Operator, bits, scales of inputs and of an own output, and the operators in the file."""


def with_scales(name, bits, scales):
    """Returns a node of an operator with these scales. ReLUs end at 6."""
    node, numbers = node_of(op_named(name), bits, 1)
    ends, scales = [], iter(scales)
    for tensor in (*node.inputs, *node.outputs):
        scale = next(scales, None) if tensor.params is not None else None
        if scale is not None:
            zero = -128 if name == "relu" else 0
            params = QuantParams(np.float32(scale), zero, bits)
            tensor = dataclasses.replace(tensor, params=params)
        ends.append(tensor)
    count = len(node.inputs)
    attributes = {**node.attributes, "maximum": 6.0} if name == "relu" else node.attributes
    return (
        dataclasses.replace(
            node, inputs=tuple(ends[:count]), outputs=tuple(ends[count:]), attributes=attributes
        ),
        numbers,
    )


@pytest.mark.sample(14)
@pytest.mark.parametrize(("name", "bits", "scales", "operators"), LIMITS)
def test_both_sides_of_a_limit(name, bits, scales, operators):
    node, numbers = with_scales(name, bits, scales)
    written = [operation for operation, *_ in FileInterpreter(file_of(node)).operations()]
    assert written == operators
    for family in KERNELS:
        assert_same(node, random_inputs(node, numbers), family)
