"""Weights with one scale for the tensor: of folded kernels, in training, model and file."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes
from keras_qat.targets import TFLM, problems
from keras_qat.tflite.reader import FileGraph
from tests.comparison import KERNELS, Exported, assert_identical, export
from tests.helpers import images, observe, scramble
from tests.networks import composite, convolutional, single_layers
from tests.networks.small import functional, layers, residual_net

FAMILIES = convolutional.FAMILIES | single_layers.FAMILIES | composite.FAMILIES
WEIGHTED = ("conv", "depthwise", "dense", "affine", "transposed2d_norm", "einsum")
NO_REFERENCE = ("elu", "tiling")
RECIPES = {
    "int8": recipes.int8(per_channel=False),
    "int4_weights": recipes.int4_weights(per_channel=False),
    "int16x8": recipes.int16x8(per_channel=False),
}
QUICK = (("depthwise", "int8"), ("affine", "int8"), ("dense", "int16x8"))
CASES = [
    pytest.param(name, recipe, marks=[] if (name, recipe) in QUICK else pytest.mark.slow)
    for recipe in RECIPES
    for name in (FAMILIES if recipe == "int8" else WEIGHTED)
    if not FAMILIES[name].slow
]


@functools.cache
def exported(name: str, recipe: str = "int8") -> Exported:
    family = FAMILIES[name]
    return export(scramble(family.model()), *family.inputs(48), recipe=RECIPES[recipe])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_the_file_gives_the_codes_of_model_and_simulation(name, recipe):
    result = exported(name, recipe)
    assert {tensor.identical for tensor in result.report.outputs} == {1.0}
    for kernels in KERNELS:
        if kernels == "xnnpack" or name not in NO_REFERENCE:
            assert_identical(result.model, result.x, kernels, result.contents)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_all_weights_have_one_scale(name, recipe):
    graph = FileGraph(exported(name, recipe).contents)
    for operation in graph.operations:
        if operation.kernel in (
            "CONV_2D",
            "DEPTHWISE_CONV_2D",
            "FULLY_CONNECTED",
            "TRANSPOSE_CONV",
        ):
            weights = graph.tensors[operation.inputs[1]]
            assert weights.dtype == np.float32 or weights.scale > 0, operation


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_tflite_micro_gives_them_too(name, recipe):
    pytest.importorskip("tflite_micro")
    result = exported(name, recipe)
    if any(None in shape for shape in FAMILIES[name].shapes) or problems(result.model, TFLM):
        pytest.skip("an operator or an open size")
    contents = keras_qat.export_tflite(result.model, batch_size=1)
    x = result.x[:4] if isinstance(result.x, np.ndarray) else [row[:4] for row in result.x]
    before, result.model.kernels = result.model.kernels, "tflm"
    report = keras_qat.verify(result.model, contents, x, kernels="tflm")
    result.model.kernels = before
    assert {tensor.identical for tensor in report.outputs} == {1.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "recipe"), [("depthwise", "int8"), ("affine", "int8")])
def test_training_computes_with_the_folded_weights_that_the_file_has(name, recipe):
    result = exported(name, recipe)
    trained = tf.nest.flatten(result.model(result.x, training=True))
    for one, other in zip(trained, tf.nest.flatten(result.model(result.x)), strict=True):
        steps = np.abs(one - other) / np.ptp(other) * 255
        assert np.max(steps) < 1.5  # Halves, which kernels round otherwise.
        assert np.mean(steps > 0.01) < 0.02


def small_channel(size: float, **kwargs):
    """A depthwise convolution whose channel 1 is `size` times channel 0 when it is folded."""
    model = functional(
        (4, 4, 2),
        build=lambda x: layers.BatchNormalization(**kwargs)(
            layers.DepthwiseConv2D(3, use_bias=False)(x)
        ),
    )
    depthwise, norm = model.layers[1:]
    depthwise.depthwise_kernel.assign(np.ones((3, 3, 2, 1)))
    norm.moving_variance.assign([1.0, 1.0 / size**2])
    norm.moving_mean.assign([0.5, 0.25 / size])
    norm.beta.assign([0.25, 2.0])
    return model


@pytest.mark.parametrize("scale", [True, False])
def test_a_channel_too_small_for_the_scale_gives_its_offset(scale):
    """In training, model and file: as if its gamma were zero, and gamma still learns."""
    x = images(32, (4, 4, 2))
    result = export(small_channel(1 / 1000, scale=scale), x, recipe=RECIPES["int8"])
    assert result.report.identical == 1
    qat = result.model
    for training in (True, False):
        np.testing.assert_allclose(qat(x, training=training)[..., 1], 2.0, atol=0.02)
        assert np.std(qat(x, training=training)[..., 0]) > 0.5
    if scale:
        gamma = qat.layers[-1].batch_norm.gamma
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(qat(x, training=True) ** 3)
        assert np.all(tape.gradient(loss, gamma).numpy() != 0)


def test_a_channel_of_few_codes_is_as_large_in_training_as_in_the_file():
    """With the statistics of the batch, too, which would hide that rounding made it larger."""
    x = images(256, (4, 4, 2))
    model = small_channel(0.6 / 127)
    qat = keras_qat.quantize_model(model, RECIPES["int8"])
    norm = qat.layers[-1].batch_norm
    z = model.layers[1](x).numpy()
    norm.moving_mean.assign(z.mean((0, 1, 2)))
    variance = z.var((0, 1, 2))
    norm.gamma.assign(np.sqrt(variance + norm.epsilon) * [1, 0.6 / 127])
    norm.moving_variance.assign(variance)
    qat(x, training=True)
    trained = np.asarray(qat(x, training=True))[..., 1].std()
    assert trained == pytest.approx(np.asarray(qat(x))[..., 1].std(), rel=0.05)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=0.02)


def test_delayed_quantization_computes_in_float():
    model, x = scramble(residual_net()), images(8, (8, 8, 1))
    qat = keras_qat.quantize_model(model, RECIPES["int8"])
    keras_qat.set_quantization(qat, False)
    keras_qat.freeze_batch_norm(qat)
    np.testing.assert_allclose(qat(x, training=True), model(x), rtol=1e-4, atol=1e-4)


def test_ranges_of_weights_are_those_of_the_folded_kernel():
    model = small_channel(0.5)
    qat = observe(keras_qat.quantize_model(model, RECIPES["int8"]), images(8, (4, 4, 2)))
    (result,) = [quantizer for quantizer in keras_qat.quantizers(qat) if "kernel" in quantizer.name]
    assert result.maximum == pytest.approx(1 / np.sqrt(1.001), rel=1e-5)
