"""Every family of layers in int8: the codes of model, simulation and file, and the operations."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import KERNELS, Exported, assert_identical, export
from tests.helpers import images, scramble
from tests.networks import convolutional, single_layers
from tests.networks.small import functional, layers

pytestmark = pytest.mark.filterwarnings("error:The weights of .* rounded again")

FAMILIES = convolutional.FAMILIES | single_layers.FAMILIES

NO_REFERENCE = ("elu", "tiling")
"""The interpreter's reference kernels have none, or no current version."""

BY_DEFAULT = {
    *("conv", "depthwise", "dense", "transposed2d_norm", "add_then_relu"),
    *("concatenations", "moves", "activations", "hard_swish", "other_rounding"),
}
"""Families that differ most. Of each operator alone, tests/ops have random examples."""

OF_TWO_RANGES = ("concatenations", "fixed_concatenation")
"""Kernels for concatenation take one range: parts with a fixed one have to be converted."""


@functools.cache
def exported(name: str) -> Exported:
    """A family, exported once."""
    family = FAMILIES[name]
    return export(scramble(family.model()), *family.inputs(), strict=True)


def of(family: str, *more: Any, marks: Any = ()) -> Any:
    """A case with a family; slow, if it does not run by default."""
    slow = [] if family in BY_DEFAULT else [pytest.mark.slow]
    return pytest.param(family, *more, marks=[*marks, *slow])


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", map(of, FAMILIES))
def test_the_file_gives_the_codes_of_the_model(family):
    """XNNPACK's, to the last one."""
    reports = zip(FAMILIES[family].structures, exported(family).report.outputs, strict=True)
    differing = [
        name for name, report in reports if (report.identical, report.max_difference) != (1, 0)
    ]
    assert not differing


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        of(family, kernels)
        for family in FAMILIES
        for kernels in KERNELS
        if kernels == "xnnpack" or family not in NO_REFERENCE
    ],
)
def test_the_simulation_gives_the_codes_of_the_file(family, kernels):
    result = exported(family)
    simulated = assert_identical(result.model, result.x, kernels, result.contents)
    assert simulated.float_layers == ()


@pytest.mark.parametrize(
    "family",
    [of(name, marks=[pytest.mark.legacy] * (name in single_layers.FAMILIES)) for name in FAMILIES],
)
def test_every_operation_is_int8(family):
    for name, reads, writes in exported(family).file.operations():
        assert name != "DEQUANTIZE"
        assert name != "QUANTIZE" or family in OF_TWO_RANGES
        for dtype in reads + writes:
            # int32: biases, and the operands of reshapes.
            assert dtype in (np.int8, np.int32), (name, reads, writes)


@pytest.mark.parametrize("family", map(of, single_layers.INEXACT))
def test_kernels_that_round_otherwise_give_the_codes_of_the_simulation(family):
    result = exported(family)
    report = keras_qat.verify(result.model, result.contents, result.x, per_layer=True)
    assert report.differing == ()
    kernels = {kernel for tensor in report.tensors for kernel in tensor.kernels}
    assert kernels & {"HARD_SWISH", "LEAKY_RELU", "PRELU", "RESIZE_BILINEAR"}


@pytest.mark.parametrize(
    ("family", "operation"),
    [("conv", "CONV_2D"), ("depthwise", "DEPTHWISE_CONV_2D"), ("dense", "FULLY_CONNECTED")],
)
def test_each_structure_is_one_operation_with_weights_per_channel(family, operation):
    file = exported(family).file
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


@pytest.mark.parametrize(
    "family", map(of, ["conv1d", "depthwise1d", "affine", "einsum", "transposed2d"])
)
def test_each_structure_is_one_operation(family):
    compute = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV", "RELU", "ADD"}
    operations = exported(family).file.operations()
    names = [name for name, _, made in operations if made[0] == np.int8]
    assert sum(name in compute for name in names) == len(FAMILIES[family].structures)


def test_channels_that_batch_norm_switches_off_give_its_offset():
    """Channel 0 has gamma 0, so the output is beta everywhere."""
    result = exported("conv")
    place = FAMILIES["conv"].place("bn")
    name = result.model.output_names[place]
    layer = result.model.outputs[place]._keras_history.layer.name.removeprefix("quant_")
    codes = result.file.run({result.model.input_names[0]: result.x[:4]})[name][..., 0]
    scale, zero_point = result.file.outputs[name]["quantization"]
    beta = result.model.get_layer(f"quant_{layer}").batch_norm.beta.numpy()[0]
    assert np.unique(codes).size == 1
    assert (codes.flat[0] - zero_point) * scale == pytest.approx(beta, abs=scale / 2 + 1e-6)


def test_hard_swish_is_one_operation_in_every_spelling():
    names = exported("hard_swish").operations
    assert names.count("HARD_SWISH") == len(FAMILIES["hard_swish"].structures)
    assert set(names) == {"HARD_SWISH", "CONV_2D"}


def test_something_like_hard_swish_is_not_taken_for_it():
    def build(x):
        gate = tf.nn.relu6(x + 3.0)
        return [x * (tf.nn.relu6(x + 2.0) / 6.0), x * (gate / 6.0), gate]

    plan = keras_qat.plan(functional((6,), build=build))
    # A gate that is read elsewhere too has to be computed.
    assert not any(row.layer == "HardSwish" for row in plan.rows)


def test_batch_norm_behind_a_transposed_convolution_is_folded_into_it():
    names = exported("transposed2d_norm").operations
    assert names.count("TRANSPOSE_CONV") == 2
    assert "DEPTHWISE_CONV_2D" not in names


def test_embedding_reads_integers():
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32", name="tokens"),
            layers.Embedding(20, 4),
            layers.Conv1D(3, 3, activation="relu"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2),
        ]
    )
    tokens = np.random.default_rng(0).integers(0, 20, (64, 6)).astype(np.int32)
    plan = keras_qat.plan(model)
    assert plan.rows[0].spec is None and "int32" in plan.rows[0].reason
    result = export(model, tokens, strict=True)
    assert result.file.inputs["tokens"]["dtype"] == np.int32
    assert "GATHER" in result.operations
    assert all(np.float32 not in reads + writes for _, reads, writes in result.file.operations())
    assert (result.report.identical, result.report.max_difference) == (1, 0)


def test_embedding_of_float_indices_quantizes_no_indices():
    inputs = keras.Input((5,))
    qat = keras_qat.quantize_model(keras.Model(inputs, layers.Embedding(300, 4)(inputs)))
    names = [quantizer.name for quantizer in keras_qat.quantizers(qat)]
    assert not any("input" in name for name in names)
    x = np.arange(5, dtype=np.float32)[None] + 256
    assert np.isfinite(qat(x, training=True)).all()


def test_adapted_normalization():
    x = 5 + images(64, (6, 6, 4))
    normalization = layers.Normalization()
    normalization.adapt(x)
    model = functional((6, 6, 4), build=lambda x: layers.Conv2D(3, 3)(normalization(x)))
    model.layers[-1].bias.assign([0.3, -0.2, 0.1])
    expected = model.predict(x, verbose=0)
    result = export(model, x, strict=True)
    assert result.operations == ["DEPTHWISE_CONV_2D", "CONV_2D"]
    assert (result.report.identical, result.report.max_difference) == (1, 0)
    assert np.abs(result.model.predict(x, verbose=0) - expected).mean() < 0.05


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "build",
    [
        lambda x: layers.Dense(3, activation="relu")(x),
        lambda x: layers.Conv1D(3, 3, padding="causal")(x),
        lambda x: layers.BatchNormalization()(x),
        lambda x: layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de")(x),
        lambda x: layers.Conv1DTranspose(3, 3, strides=2)(x),
    ],
    ids=["dense", "conv", "norm", "einsum", "transposed"],
)
def test_unknown_number_of_steps(build):
    result = export(scramble(functional((None, 4), build=build)), images(32, (9, 4)), strict=True)
    assert (result.report.identical, result.report.max_difference) == (1, 0)
    assert "DEQUANTIZE" not in result.operations


@pytest.mark.slow
def test_grouped_convolutions_where_tensorflow_does_without_onednn():
    """TensorFlow fuses a bias with a convolution, and refuses to compute that with groups."""
    program = """
import numpy as np
import keras_qat
from keras_qat import keras

inputs = keras.Input((8, 8, 8))
outputs = keras.layers.Conv2D(8, 3, groups=4, activation="relu", bias_initializer="ones")(inputs)
x = np.random.default_rng(1).normal(size=(16, 8, 8, 8)).astype(np.float32)
qat = keras_qat.quantize_model(keras.Model(inputs, outputs))
keras_qat.calibrate(qat, x)
file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
assert np.array_equal(file.predict(x), qat.predict(x, verbose=0))
"""
    env = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}  # It is read when TensorFlow is imported.
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
