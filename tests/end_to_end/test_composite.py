"""Layers of every kind: quantized, trained a step, saved, exported and run by the interpreter."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import runs_channels_first
from tests.networks.composite import FAMILIES

BY_DEFAULT = {
    *("dot", "volumes", "channels_first"),
    *("augmentation", "fixed_operation"),
}


def names(int8: bool = False) -> list[Any]:
    """Cases with a family: all of them, or those that compute in int8."""
    return [
        name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow)
        for name, family in FAMILIES.items()
        if family.int8 or not int8
    ]


NAMES = names()


@dataclasses.dataclass
class Made:
    """A family after all steps."""

    float_model: Any
    model: Any
    x: Any
    moved: float
    file: FileInterpreter
    report: Any


def train_a_step(model: Any, x: Any) -> float:
    """One step of gradient descent; the largest change of a weight."""
    with tf.GradientTape() as tape:
        outputs = tf.nest.flatten(model(x, training=True))
        loss = tf.add_n([tf.reduce_mean(output**2) for output in outputs])
    gradients = tape.gradient(loss, model.trainable_variables)
    before = [variable.numpy() for variable in model.trainable_variables]
    pairs = zip(gradients, model.trainable_variables, strict=True)
    keras.optimizers.SGD(1e-3).apply_gradients([pair for pair in pairs if pair[0] is not None])
    changes = zip(before, model.trainable_variables, strict=True)
    return max((float(np.max(np.abs(old - new))) for old, new in changes), default=1.0)


@functools.cache
def made(family: str) -> Made:
    """A family, trained and exported once."""
    inputs = FAMILIES[family].inputs()
    x = inputs if len(inputs) > 1 else inputs[0]
    float_model = FAMILIES[family].model()
    model = keras_qat.quantize_model(float_model)
    moved = train_a_step(model, x)
    contents = keras_qat.export_tflite(model)
    report = keras_qat.verify(model, contents, x)
    return Made(float_model, model, x, moved, FileInterpreter(contents), report)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", NAMES)
def test_without_quantization_it_computes_what_the_float_model_does(family):
    if family == "channels_first" and not runs_channels_first():
        pytest.skip("TensorFlow has no convolution of channels first on this CPU")
    inputs = FAMILIES[family].inputs(8)
    x = inputs if len(inputs) > 1 else inputs[0]
    model = made(family).float_model
    qat = keras_qat.quantize_model(model)
    keras_qat.set_quantization(qat, False)
    for expected, result in zip(
        tf.nest.flatten(model(x, training=False)),
        tf.nest.flatten(qat(x, training=False)),
        strict=True,
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    assert len(qat.trainable_weights) == len(model.trainable_weights)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", NAMES)
def test_it_trains(family):
    assert made(family).moved > 0 or not made(family).model.trainable_weights


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_it_reloads_equal(family, tmp_path):
    model, x = made(family).model, made(family).x
    model.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    outputs = [tf.nest.flatten(variant(x, training=False)) for variant in (model, loaded)]
    for expected, result in zip(*outputs, strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", NAMES)
def test_the_file_gives_the_codes_of_the_model(family):
    """Layers in float add up in another order there, by which a code may be another one."""
    result = FAMILIES[family]
    for structure, report in zip(result.structures, made(family).report.outputs, strict=True):
        assert report.identical >= (1 if result.int8 else 0.99), structure
        assert report.max_difference <= (0 if result.int8 else 1), structure


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", NAMES)
def test_float_operations_are_those_that_the_plan_says(family):
    plan = keras_qat.plan(made(family).float_model)
    computing = {
        operation
        for operation, reads, writes in made(family).file.operations()
        if np.dtype(np.float32) in reads + writes
    }
    assert bool(computing - {"QUANTIZE", "DEQUANTIZE"}) == bool(plan.float_layers)
    assert bool(plan.float_layers) != FAMILIES[family].int8


@pytest.mark.parametrize("family", NAMES)
def test_nothing_is_in_float64(family):
    """Microcontrollers do not have it."""
    for _, reads, writes in made(family).file.operations():
        assert np.dtype(np.float64) not in reads + writes


@pytest.mark.parametrize("family", names(int8=True))
def test_integers_are_not_converted_on_the_way(family):
    operations = [operation for operation, _, _ in made(family).file.operations()]
    assert "DEQUANTIZE" not in operations
    # Scores of attention get room for what is hidden; ConvLSTM2D brings 16 bits to 8 in each step.
    steps = 3 if family == "conv_lstm" else 0
    assert operations.count("QUANTIZE") == operations.count("SELECT_V2") + steps


def test_only_layers_without_kernels_stay_in_float():
    plan = keras_qat.plan(FAMILIES["pass_through"].model())
    calls = [call for call in plan.graph.calls if call.name in plan.float_layers]
    kinds = {type(call.layer).__name__ for call in calls}
    assert kinds == {"GroupNormalization", "LayerNormalization", "TFOpLambda"}
