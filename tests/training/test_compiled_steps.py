"""Training steps that XLA compiles, against the same steps without it."""

from __future__ import annotations

import numpy as np
import pytest

import keras_qat
from keras_qat.frontend.keras2.backend import keras
from tests.helpers import rng

layers = keras.layers
X = rng(3).uniform(-1.0, 1.0, (8, 6, 6, 2)).astype(np.float32)
Y = rng(4).normal(size=(8, 3)).astype(np.float32)

RECIPES = {
    "int8": keras_qat.recipes.int8,
    "contrib": keras_qat.recipes.contrib,
    "int16x8": keras_qat.recipes.int16x8,
    "learned": lambda: keras_qat.recipes.int8(ranges="learned"),
    "per tensor": lambda: keras_qat.recipes.int8(per_channel=False),
}
PHASES = {
    "float": lambda qat: keras_qat.set_quantization(qat, enabled=False),
    "quantizing": lambda qat: None,
    "frozen statistics": keras_qat.freeze_batch_norm,
    "frozen ranges": keras_qat.freeze_ranges,
}


def net():
    """A convolution, one by channel, a sum and a dense layer, with and without ReLU."""
    image = keras.Input((6, 6, 2))
    x = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(4, 3, use_bias=False)(image)))
    y = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x))
    x = layers.Add()([x, layers.Conv2D(4, 1)(layers.ReLU()(y))])
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_by_xla_equals_one_without(recipe, phase):
    keras.utils.set_random_seed(0)
    model, trained, losses = net(), [], []
    for jit_compile in (False, True):
        qat = keras_qat.quantize_model(model, RECIPES[recipe]())
        keras_qat.calibrate(qat, X)
        PHASES[phase](qat)
        qat.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=jit_compile)
        losses.append([qat.train_on_batch(X, Y) for _ in range(2)])
        trained.append(qat)
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)
    for one, other in zip(trained[0].weights, trained[1].weights, strict=True):
        # Sums are added up in another order: some last bits of the largest number.
        size = max(1e-3, float(np.abs(one.numpy()).max()))
        np.testing.assert_allclose(other, one, rtol=0, atol=4e-6 * size, err_msg=one.name)
    if phase != "float" and recipe != "contrib":  # Inference of contrib is a simulation.
        contents = keras_qat.export_tflite(trained[1])
        assert keras_qat.verify(trained[1], contents, X).identical == 1.0
