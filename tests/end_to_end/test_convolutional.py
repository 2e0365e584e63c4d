"""Every structure of layers, quantized, exported and run by the TFLite interpreter.

Bounds are those of TFLite's default kernels (XNNPACK). The reference kernels compute a mean
(`GlobalAveragePooling2D`) with another rounding.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.interpreter import TFLiteModel
from tests.helpers import observe, scramble
from tests.networks.convolutional import FAMILIES, FIXED_CONCATENATION, family_inputs, family_model


@functools.cache
def exported(family: str) -> tuple[Any, TFLiteModel, Any]:
    """A family's quantized model, its file, and how they compare: computed once."""
    model = scramble(family_model(family))
    qat = keras_qat.quantize_model(model)
    assert keras_qat.plan(model).float_layers == {}
    inputs = family_inputs(family)
    observe(qat, *inputs)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, inputs if len(inputs) > 1 else inputs[0])
    return qat, TFLiteModel(contents), report


def output_report(family: str, structure: str) -> Any:
    _, structures = FAMILIES[family]
    return exported(family)[2].outputs[list(structures).index(structure)]


@pytest.mark.parametrize(
    ("family", "structure"),
    [(family, structure) for family, (_, found) in FAMILIES.items() for structure in found],
)
def test_the_file_gives_the_codes_of_the_model(family, structure):
    report = output_report(family, structure)
    assert (report.identical, report.max_difference) == (1, 0)


@pytest.mark.parametrize("structure", FIXED_CONCATENATION)
def test_joining_a_fixed_range_stays_within_one_step(structure):
    """The file converts the parts to one range first: a rounding that training does not have."""
    assert output_report("fixed_concatenation", structure).max_difference <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_is_int8(family):
    for name, reads, writes in exported(family)[1].operations():
        assert name != "DEQUANTIZE"
        for dtype in reads + writes:
            # int32: biases, and the operands of reshapes.
            assert dtype in (np.int8, np.int32), (name, reads, writes)


@pytest.mark.parametrize(
    "family", ["conv", "depthwise", "separable", "dense", "dense_3d", "pooling", "blocks", "heads"]
)
def test_nothing_is_converted_on_the_way(family):
    assert "QUANTIZE" not in [name for name, _, _ in exported(family)[1].operations()]


@pytest.mark.parametrize(
    ("family", "operation"),
    [("conv", "CONV_2D"), ("depthwise", "DEPTHWISE_CONV_2D"), ("dense", "FULLY_CONNECTED")],
)
def test_each_structure_is_one_operation_with_weights_per_channel(family, operation):
    _, file, _ = exported(family)
    details = {each["index"]: each for each in file.interpreter.get_tensor_details()}
    found = [
        details[each["inputs"][1]]
        for each in file.interpreter._get_ops_details()
        if each["op_name"] == operation
    ]
    assert len(found) == len(FAMILIES[family][1])
    for weights in found:
        axis = weights["quantization_parameters"]["quantized_dimension"]
        scales = weights["quantization_parameters"]["scales"]
        assert axis == (3 if operation == "DEPTHWISE_CONV_2D" else 0)
        assert len(scales) == weights["shape"][axis] > 1
        assert not weights["quantization_parameters"]["zero_points"].any()


def test_channels_that_batch_norm_switches_off_give_its_offset():
    """Channel 0 has gamma 0, so the output is beta everywhere."""
    qat, file, _ = exported("conv")
    index = list(FAMILIES["conv"][1]).index("bn")
    name = qat.output_names[index]
    x = family_inputs("conv")[0][:4]
    codes = file.run({qat.input_names[0]: x})[name][..., 0]
    scale, zero_point = file.outputs[name]["quantization"]
    beta = qat.get_layer(f"quant_{name_of_conv(qat, index)}").batch_norm.beta.numpy()[0]
    assert np.unique(codes).size == 1
    assert (codes.flat[0] - zero_point) * scale == pytest.approx(beta, abs=scale / 2 + 1e-6)


def name_of_conv(qat: Any, output: int) -> str:
    return qat.outputs[output]._keras_history.layer.name.removeprefix("quant_")
