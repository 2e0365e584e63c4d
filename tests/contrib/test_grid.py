"""Tests one layer in all combinations, like the original's parametrized tests of quantizers.

The combinations are Conv2D, Dense, depthwise and dilated convolution x bias or BatchNormalization x
activation x bypass x delay x scope.
"""

import functools

import numpy as np
import pytest

import keras_qat
from keras_qat.training.schedule import list_scheduled_layers
from tests.helpers import assert_all_equal, images, values
from tests.networks.contrib import ACTIVATIONS, KERNELS, SHAPE, single

GRID = [
    (kind, batch_norm, activation, bypass, scope)
    for kind in KERNELS
    for batch_norm in (False, True)
    for activation in ACTIVATIONS
    for bypass in (False, True)
    for scope in (None, "test")
]

contrib = keras_qat.recipes.contrib


@functools.cache
def recipe_with(delay: int | None) -> keras_qat.recipes.Recipe:
    return contrib(quant_delay=delay)


@pytest.mark.sample(16)
@pytest.mark.parametrize(("kind", "batch_norm", "activation", "bypass", "scope"), GRID)
def test_placement(kind, batch_norm, activation, bypass, scope):
    model = single(kind, activation, bypass, batch_norm, scope)
    prefix = f"{scope}/" if scope else ""
    kernel = "kernel" if kind in ("conv", "fc") else "depthwise_kernel"
    expected = {f"{prefix}layer/{kernel}": "kernel"}
    if batch_norm:
        expected[f"{prefix}layer/{kernel}"] += f", folded with {prefix}bn"
    if bypass:
        expected[f"{prefix}bn" if batch_norm else f"{prefix}layer"] = "conv_quant"
    expected[f"{prefix}activation"] = "act_quant"

    plan = keras_qat.plan(model, "contrib", scope=scope)
    assert {row.tensor: row.reason for row in plan.rows if row.spec} == expected

    for row in plan.rows:
        if row.spec is None:
            continue
        is_weight = row.role == "weight"
        assert row.spec.narrow_range == is_weight
        assert row.spec.observer == ("last_value" if is_weight else "shadowed_moving_average")
        assert row.spec.initial_range == ((0, 6) if row.reason == "act_quant" else (-6, 6))


@pytest.mark.sample(2)
@pytest.mark.parametrize("delay", [None, 5000])
@pytest.mark.parametrize(("kind", "batch_norm", "activation", "bypass", "scope"), GRID[::7])
def test_rewrite(kind, batch_norm, activation, bypass, scope, delay):
    """The model follows the plan, all quantizers are delayed, and a second call changes nothing."""
    model = single(kind, activation, bypass, batch_norm, scope)
    quantized = keras_qat.quantize_model(model, recipe_with(delay), scope=scope)
    result = {
        tensor for quantizer in keras_qat.quantizers(quantized) for tensor in quantizer.quantizes
    }
    assert result == {
        row.tensor for row in keras_qat.plan(model, "contrib", scope=scope).rows if row.spec
    }
    assert {int(layer.quantize_from) for layer in list_scheduled_layers(quantized)} == {delay or 0}

    again = keras_qat.quantize_model(quantized, recipe_with(delay))
    assert again.get_config() == quantized.get_config()
    assert_all_equal(values(again.weights), values(quantized.weights))


@pytest.mark.sample(2)
@pytest.mark.parametrize("delay", [None, 3])
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("kind", KERNELS)
def test_training(kind, batch_norm, delay):
    """Weights change, and ranges are observed with and without a delay."""
    model = single(kind, "relu6", bypass=True, batch_norm=batch_norm)
    quantized = keras_qat.quantize_model(model, recipe_with(delay))
    x = images(shape=model.input_shape[1:])
    quantized.compile("sgd", "mse")
    before = values(quantized.trainable_weights)
    quantized.fit(x, np.ones((len(x), *model.output_shape[1:])), 8, verbose=0)
    for old, new in zip(before, quantized.trainable_weights, strict=True):
        assert np.any(old != new.numpy()), new.name
    for quantizer in keras_qat.quantizers(quantized):
        assert quantizer.minimum <= 0 < quantizer.maximum
        assert (quantizer.minimum, quantizer.maximum) not in ((-6, 6), (0, 6)), quantizer.name


def test_the_range_of_weights_is_that_of_the_last_step():
    """`weights_quant` reads the values that `AssignMinLast` assigns in the same step."""
    model = single("conv")
    quantized = keras_qat.quantize_model(model, "contrib")
    kernel = model.get_layer("layer").kernel.numpy()
    quantized(images(shape=SHAPE), training=True)
    (weights, _) = keras_qat.quantizers(quantized)
    assert (weights.minimum, weights.maximum) == (kernel.min(), kernel.max())
    assert (weights.minimum, weights.maximum) != (-6, 6)


def test_with_batch_norm_the_folded_kernel_is_quantized():
    """`weights_quant` reads `mul_fold`: the kernel times gamma, divided by the moving deviation."""
    model = single("conv", batch_norm=True)
    norm = model.get_layer("bn")
    norm.gamma.assign([2.0, 0.5, 1.0, -1.5])
    norm.moving_variance.assign([0.25, 1.0, 4.0, 9.0])
    kernel = model.get_layer("layer").kernel.numpy()
    factor = norm.gamma.numpy() / np.sqrt(norm.moving_variance.numpy() + norm.epsilon)
    quantized = keras_qat.quantize_model(model, "contrib")
    quantized(images(shape=SHAPE), training=True)
    (weights, _) = keras_qat.quantizers(quantized)
    folded = kernel * factor
    np.testing.assert_allclose(
        (weights.minimum, weights.maximum), (folded.min(), folded.max()), rtol=1e-5
    )
