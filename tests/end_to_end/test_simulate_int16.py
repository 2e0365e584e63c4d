"""Every structure with int16 activations: model, integer simulation and file give one another."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import KERNELS, Product, assert_identical
from tests.helpers import images, observe, scramble
from tests.networks import convolutional, single_layers
from tests.networks.small import functional, layers

ALL = {**convolutional.FAMILIES, **single_layers.FAMILIES}

LEFT_OUT = {
    "activations": ["gelu", "gelu_function"],
    "activation_chains": ["conv_gelu", "conv_gelu_function"],
    "operations": ["gelu", "tile"],
    "moves": ["repeat"],
    "other_rounding": ["prelu", "prelu_shared_axes"],
}
"""Members that are refused, in float, or of which the reference kernels have no version."""

QUICK = [
    "dense",
    "blocks",
    "pooling",
    "fixed_concatenation",
    "other_rounding",
    "activation_chains",
    "einsum",
]


@functools.cache
def exported(family: str) -> tuple[Any, list[np.ndarray], bytes]:
    """A family's quantized model, its inputs and its file: made once for all kernels."""
    module = convolutional if family in convolutional.FAMILIES else single_layers
    inputs = module.family_inputs(family, count=64)
    model = scramble(module.family_model(family))
    named = zip(ALL[family][1], model.outputs, strict=True)
    outputs = [output for name, output in named if name not in LEFT_OUT.get(family, ())]
    qat = observe(keras_qat.quantize_model(keras.Model(model.inputs, outputs), "int16x8"), *inputs)
    return qat, inputs, keras_qat.export_tflite(qat)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "family",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in ALL
        if name not in ("unit_norm", "cosine", "cosines")  # In float.
    ],
)
def test_codes_are_those_of_the_file(family, kernels):
    qat, inputs, contents = exported(family)
    x = inputs if len(inputs) > 1 else inputs[0]
    simulated = assert_identical(qat, x, kernels, contents)
    assert simulated.float_layers == ()
    assert {each.codes.dtype for each in simulated.outputs.values()} == {np.dtype(np.int16)}
    report = keras_qat.verify(qat, contents, x, kernels=kernels)
    for each in report.outputs:
        assert each.identical >= 0.999, each
        assert each.max_difference <= 1, each


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("merge", [layers.Add, layers.Subtract])
def test_sums_of_many_codes(merge, kernels):
    """TFLite's optimized kernel for sums gives one code in a million that the other one does not.

    What is left over of blocks of 16 the other one computes.
    """
    shape = (301, 301, 3)
    model = functional(shape, shape, build=lambda a, b: merge()([a, b]))
    numbers = np.random.default_rng(0)
    x = [(scale * numbers.normal(size=(8, *shape))).astype(np.float32) for scale in (1, 0.13)]
    qat = observe(keras_qat.quantize_model(model, "int16x8"), *x)
    assert_identical(qat, x, kernels)


def test_codes_as_inputs():
    qat, (x, *_), _ = exported("dense")
    simulated = keras_qat.simulate(qat, x)
    codes = simulated.tensors[qat.input_names[0]].codes
    assert codes.dtype == np.int16
    again = keras_qat.simulate(qat, codes)
    for name, output in simulated.outputs.items():
        np.testing.assert_array_equal(again.outputs[name].codes, output.codes)


def test_gelu_is_looked_up():
    model = functional((6,), build=lambda x: layers.Activation("gelu", name="bell")(x))
    x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    qat = observe(keras_qat.quantize_model(model, "int16x8"), x)
    for kernels in KERNELS:
        assert_identical(qat, x, kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_layers_without_exact_multipliers(kernels):
    """A layer with two outputs' ranges has one scale for its weights; custom ones keep theirs.

    Their kernels round multipliers to 15 bits, and the simulation does so too.
    """
    keras_qat.register_rule(Product, weights={"kernel": ()})
    conv, norm = layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization()

    def build(x):
        once = norm(conv(x))
        return [once, norm(conv(layers.ReLU()(once))), Product()(layers.Flatten()(x))]

    model = scramble(functional((6, 6, 4), build=build))
    x = images(64, (6, 6, 4))
    qat = keras_qat.quantize_model(model, "int16x8")
    keras_qat.freeze_batch_norm(qat)
    qat(x, training=True)
    assert_identical(qat, x, kernels)
