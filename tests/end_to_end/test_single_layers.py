"""Every other layer, activation and operation, quantized, exported and run by the interpreter."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.interpreter import TFLiteModel
from keras_qat.keras2.backend import keras
from tests.helpers import images, observe, scramble
from tests.networks.single_layers import (
    FAMILIES,
    HARD_SWISH,
    family_inputs,
    family_model,
)
from tests.networks.small import functional, layers


def export(model: Any, *inputs: np.ndarray) -> tuple[Any, TFLiteModel, Any]:
    """The quantized model, its file and how they compare."""
    qat = observe(keras_qat.quantize_model(model, strict=True), *inputs)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, list(inputs) if len(inputs) > 1 else inputs[0])
    return qat, TFLiteModel(contents), report


@functools.cache
def exported(family: str) -> tuple[Any, TFLiteModel, Any]:
    """A family, exported once."""
    return export(scramble(family_model(family)), *family_inputs(family))


def output_report(family: str, structure: str) -> Any:
    return exported(family)[2].outputs[list(FAMILIES[family][1]).index(structure)]


def members(families: dict[str, Any]) -> list[tuple[str, str]]:
    return [(family, name) for family, (_, found) in families.items() for name in found]


@pytest.mark.parametrize(("family", "structure"), members(FAMILIES))
def test_the_file_gives_the_codes_of_the_model(family, structure):
    report = output_report(family, structure)
    assert (report.identical, report.max_difference) == (1, 0)


@pytest.mark.legacy
@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_is_int8(family):
    for name, reads, writes in exported(family)[1].operations():
        assert name not in ("QUANTIZE", "DEQUANTIZE")
        for dtype in reads + writes:
            assert dtype in (np.int8, np.int32), (name, reads, writes)


def test_hard_swish_is_one_operation_in_every_spelling():
    names = [name for name, _, _ in exported("hard_swish")[1].operations()]
    assert names.count("HARD_SWISH") == len(HARD_SWISH)
    assert set(names) == {"HARD_SWISH", "CONV_2D"}


def test_something_like_hard_swish_is_not_taken_for_it():
    def build(x):
        gate = tf.nn.relu6(x + 3.0)
        return [x * (tf.nn.relu6(x + 2.0) / 6.0), x * (gate / 6.0), gate]

    plan = keras_qat.plan(functional((6,), build=build))
    # A gate that is read elsewhere too has to be computed.
    assert not any(row.layer == "HardSwish" for row in plan.rows)


@pytest.mark.parametrize("family", ["conv1d", "depthwise1d", "affine", "einsum", "transposed2d"])
def test_each_structure_is_one_operation(family):
    compute = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV", "RELU", "ADD"}
    names = [name for name, _, made in exported(family)[1].operations() if made[0] == np.int8]
    assert sum(name in compute for name in names) == len(FAMILIES[family][1])


def test_batch_norm_behind_a_transposed_convolution_is_folded_into_it():
    names = [name for name, _, _ in exported("transposed2d_norm")[1].operations()]
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
    _, file, report = export(model, tokens)
    assert file.inputs["tokens"]["dtype"] == np.int32
    assert "GATHER" in [name for name, _, _ in file.operations()]
    assert all(np.float32 not in reads + writes for _, reads, writes in file.operations())
    assert (report.identical, report.max_difference) == (1, 0)


def test_embedding_of_float_indices_quantizes_no_indices():
    inputs = keras.Input((5,))
    qat = keras_qat.quantize_model(keras.Model(inputs, layers.Embedding(300, 4)(inputs)))
    names = [each.name for each in keras_qat.quantizers(qat)]
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
    qat, file, report = export(model, x)
    assert [name for name, _, _ in file.operations()] == ["DEPTHWISE_CONV_2D", "CONV_2D"]
    assert (report.identical, report.max_difference) == (1, 0)
    assert np.abs(qat.predict(x, verbose=0) - expected).mean() < 0.05


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
    model = scramble(functional((None, 4), build=build))
    x = images(32, (9, 4))
    _, file, report = export(model, x)
    assert (report.identical, report.max_difference) == (1, 0)
    assert "DEQUANTIZE" not in [name for name, _, _ in file.operations()]
