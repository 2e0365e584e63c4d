"""Tests families of layers with recipes of several widths: model, simulation and file agree."""

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes
from keras_qat.tflite.reader import FileGraph
from tests.comparison import KERNELS, Exported, assert_identical, export
from tests.helpers import scramble
from tests.networks import composite, convolutional, single_layers

pytestmark = pytest.mark.filterwarnings("error:The weights of .* rounded again")

FAMILIES = convolutional.FAMILIES | single_layers.FAMILIES | composite.FAMILIES

RECIPES = {
    "int8": recipes.int8(),
    "int16x8": recipes.int16x8(),
    "int8 per tensor": recipes.int8(per_channel=False),
    "int4 per tensor": recipes.int4_weights(per_channel=False),
    "int16x8 per tensor": recipes.int16x8(per_channel=False),
}

WEIGHTED = ("conv", "depthwise", "dense", "affine", "transposed2d_norm", "einsum")
"""Families that are tested with all recipes."""

LEFT_OUT = {
    "activations": ["gelu", "gelu_function"],
    "activation_chains": ["conv_gelu", "conv_gelu_function"],
    "operations": ["gelu"],
    "other_rounding": ["prelu", "prelu_shared_axes"],
}
"""Members that are refused, or in float, with 16 bits."""

IN_FLOAT = ("unit_norm", "cosine", "cosines")
"""Families that are in float with 16 bits."""

NO_REFERENCE = ("elu", "tiling")
"""The interpreter has no reference kernels for these, or only outdated versions."""

OF_TWO_RANGES = ("concatenations", "fixed_concatenation")
"""Kernels for concatenation support one range, so inputs with a fixed range are converted."""

WITH_STATES = ("lstm", "gru", "simple_rnn")
"""Families that convert initial states to the ranges of their states."""

BY_DEFAULT = {
    *(("conv", "int8"), ("depthwise", "int8"), ("dense", "int8"), ("transposed2d_norm", "int8")),
    *(("hard_swish", "int8"), ("concatenations", "int8"), ("other_rounding", "int8")),
    *(("dense", "int16x8"), ("affine", "int8 per tensor")),
}
"""The most different cases. tests/ops has random examples of each operator."""

LEGACY = {("conv", "int8"), ("dense", "int8"), ("dense", "int16x8")}


def is_tested(family: str, recipe: str) -> bool:
    if recipe == "int8":
        return True
    if recipe == "int16x8":
        return family not in composite.FAMILIES and family not in IN_FLOAT
    return family in WEIGHTED or (recipe == "int8 per tensor" and not FAMILIES[family].slow)


def make_case(family: str, recipe: str, *more: Any) -> Any:
    marks = [] if (family, recipe) in BY_DEFAULT else [pytest.mark.slow]
    marks += [pytest.mark.legacy] * ((family, recipe) in LEGACY)
    return pytest.param(family, recipe, *more, marks=marks)


PAIRS = [(name, recipe) for recipe in RECIPES for name in FAMILIES if is_tested(name, recipe)]
CASES = [make_case(*pair) for pair in PAIRS]
PER_TENSOR = [make_case(*pair) for pair in PAIRS if "per tensor" in pair[1]]


@functools.cache
def exported(family: str, recipe: str) -> Exported:
    made = FAMILIES[family]
    model = scramble(made.model(LEFT_OUT.get(family, ()) if recipe == "int16x8" else ()))
    strict = recipe == "int8" and family not in composite.FAMILIES
    return export(model, *made.inputs(48), recipe=RECIPES[recipe], strict=strict)


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_the_file_computes_what_the_model_does(family, recipe):
    """Float layers sum in another order, which may change a quantized value by one."""
    in_float = recipe == "int8" and not FAMILIES[family].int8
    least, most = (0.99, 1) if in_float else (0.999, 1) if recipe == "int16x8" else (1, 0)
    for tensor in exported(family, recipe).report.outputs:
        assert tensor.identical >= least and tensor.max_difference <= most, tensor


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("family", "recipe", "kernels"),
    [
        make_case(family, recipe, kernels)
        for family, recipe in PAIRS
        for kernels in KERNELS
        if (kernels == "xnnpack" or family not in NO_REFERENCE)
        and (FAMILIES[family].int8 or recipe != "int8")
    ],
)
def test_the_simulation_computes_what_the_file_does(family, recipe, kernels):
    result = exported(family, recipe)
    simulated = assert_identical(result.model, result.x, kernels, result.contents)
    assert not simulated.float_layers or not FAMILIES[family].int8
    if recipe == "int16x8":
        assert {output.codes.dtype for output in simulated.outputs.values()} == {np.dtype(np.int16)}
        report = keras_qat.verify(result.model, result.contents, result.x, kernels=kernels)
        for tensor in report.outputs:
            assert tensor.identical >= 0.999 and tensor.max_difference <= 1, tensor


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_types_of_all_operations(family, recipe):
    file, made = exported(family, recipe).file, FAMILIES[family]
    names = [name for name, _, _ in file.operations()]
    types = {dtype for _, reads, writes in file.operations() for dtype in reads + writes}
    computing = {
        name for name, reads, writes in file.operations() if np.dtype(np.float32) in reads + writes
    }
    assert np.dtype(np.float64) not in types  # Microcontrollers do not support it.
    assert bool(computing - {"QUANTIZE", "DEQUANTIZE"}) is not made.int8
    if made.int8:
        assert "DEQUANTIZE" not in names
    if recipe == "int16x8":
        unread = {np.float32} if family == "add_same_twice" else set()
        assert not computing
        assert {array.dtype.type for array in file.inputs.values()} == {np.int16} | unread
        assert {output.dtype.type for output in file.outputs.values()} == {np.int16}
    elif family not in composite.FAMILIES and recipe == "int8":
        # int32: biases, and the operands of reshapes.
        assert types <= {np.dtype(np.int8), np.dtype(np.int32)}
        assert "QUANTIZE" not in names or family in OF_TWO_RANGES
    elif made.int8 and recipe == "int8" and family not in WITH_STATES:
        # Attention scores get room for masked scores. ConvLSTM2D converts 16 bits to 8 in steps.
        steps = 3 if family == "conv_lstm" else 0
        assert names.count("QUANTIZE") == names.count("SELECT_V2") + steps


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "recipe"), PER_TENSOR)
def test_weights_per_tensor_have_one_scale(family, recipe):
    graph = FileGraph(exported(family, recipe).contents)
    kernels = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV")
    for operation in graph.operations:
        if operation.kernel in kernels:
            weights = graph.tensors[operation.inputs[1]]
            assert weights.dtype == np.float32 or weights.scale > 0, operation


@pytest.mark.parametrize("recipe", ["int8 per tensor"])
@pytest.mark.parametrize("family", ["affine", pytest.param("depthwise", marks=pytest.mark.slow)])
def test_training_computes_with_the_folded_weights_that_the_file_has(family, recipe):
    result = exported(family, recipe)
    trained = tf.nest.flatten(result.model(result.x, training=True))
    for one, other in zip(trained, tf.nest.flatten(result.model(result.x)), strict=True):
        steps = np.abs(one - other) / np.ptp(other) * 255
        assert np.max(steps) < 1.5  # Halves, which kernels round differently.
        assert np.mean(steps > 0.01) < 0.02


def test_only_layers_without_kernels_stay_in_float():
    plan = keras_qat.plan(FAMILIES["pass_through"].model())
    calls = [call for call in plan.graph.calls if call.name in plan.float_layers]
    kinds = {type(call.layer).__name__ for call in calls}
    assert kinds == {"GroupNormalization", "LayerNormalization", "TFOpLambda"}


@pytest.mark.legacy
def test_what_has_no_int16_kernel_is_in_float():
    family = FAMILIES["other_rounding"]
    model = family.model()
    plan = keras_qat.plan(model, "int16x8")
    result = export(scramble(model), *family.inputs(), recipe="int16x8")
    operations = result.file.operations()
    floats = {name for name, reads, writes in operations if np.float32 in reads + writes}
    assert floats - {"QUANTIZE", "DEQUANTIZE"} <= {"PRELU"}
    assert any("no int16 kernel" in reason for reason in plan.float_layers.values())
    assert result.report.max_difference <= 1
    assert result.report.identical >= 0.999


@pytest.mark.parametrize("family", ["other_rounding", "hard_swish"])
def test_kernels_that_round_otherwise_compute_what_the_simulation_does(family):
    result = exported(family, "int8")
    report = keras_qat.verify(result.model, result.contents, result.x, per_layer=True)
    assert report.differing == ()
    kernels = {kernel for tensor in report.tensors for kernel in tensor.kernels}
    assert kernels & {"HARD_SWISH", "LEAKY_RELU", "PRELU", "RESIZE_BILINEAR"}


@pytest.mark.parametrize(
    ("family", "operation"),
    [("conv", "CONV_2D"), ("depthwise", "DEPTHWISE_CONV_2D"), ("dense", "FULLY_CONNECTED")],
)
def test_each_structure_is_one_operation_with_weights_per_channel(family, operation):
    file = exported(family, "int8").file
    details = {tensor["index"]: tensor for tensor in file.interpreter.get_tensor_details()}
    result = [
        details[item["inputs"][1]]
        for item in file.interpreter._get_ops_details()
        if item["op_name"] == operation
    ]
    assert len(result) == len(FAMILIES[family].structures)
    for weights in result:
        axis = weights["quantization_parameters"]["quantized_dimension"]
        scales = weights["quantization_parameters"]["scales"]
        assert axis == (3 if operation == "DEPTHWISE_CONV_2D" else 0)
        assert len(scales) == weights["shape"][axis] > 1
        assert not weights["quantization_parameters"]["zero_points"].any()


def test_channels_that_batch_norm_switches_off_give_its_offset():
    """Channel 0 has gamma 0, so its output is beta everywhere."""
    result = exported("conv", "int8")
    place = FAMILIES["conv"].place("bn")
    name = result.model.output_names[place]
    layer = result.model.outputs[place]._keras_history.layer.name.removeprefix("quant_")
    codes = result.file.run({result.model.input_names[0]: result.x[:4]})[name][..., 0]
    end = result.file.outputs[name]
    beta = result.model.get_layer(f"quant_{layer}").batch_norm.beta.numpy()[0]
    assert np.unique(codes).size == 1
    assert end.dequantize(codes.flat[0]) == pytest.approx(beta, abs=end.scale / 2 + 1e-6)


def test_hard_swish_is_one_operation_in_every_spelling():
    names = exported("hard_swish", "int8").operations
    assert names.count("HARD_SWISH") == len(FAMILIES["hard_swish"].structures)
    assert set(names) == {"HARD_SWISH", "CONV_2D"}


def test_batch_norm_behind_a_transposed_convolution_is_folded_into_it():
    names = exported("transposed2d_norm", "int8").operations
    assert names.count("TRANSPOSE_CONV") == 2
    assert "DEPTHWISE_CONV_2D" not in names
