"""Kernels that a layer computes from its weights."""

import numpy as np
import pytest

import keras_qat
from tests.helpers import images, keras, layers
from tests.networks.computed_kernels import COMPUTED

pytestmark = pytest.mark.legacy

SHAPE = (8, 8, 4)

RECIPES = {
    "per channel": keras_qat.recipes.int8(),
    "per tensor": keras_qat.recipes.int8(per_channel=False),
    "4 bits": keras_qat.recipes.int4_weights(),
    "16 bits": keras_qat.recipes.int16x8(),
}


def model_of(name):
    x = keras.Input(SHAPE)
    return keras.Model(x, COMPUTED[name](x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_kernel_is_a_constant_of_the_file(name, recipe, tmp_path):
    """One kernel per layer, which trains and is exact; both forms of saved models have it."""
    model = model_of(name)
    qat = keras_qat.quantize_model(model, RECIPES[recipe], strict=True)
    assert "WeightTensor" not in str(keras_qat.plan(model, RECIPES[recipe]))
    data = images(16)
    before = [weight.numpy() for weight in qat.trainable_weights]
    qat.compile(keras.optimizers.SGD(0.1), "mse")
    qat.fit(data, np.ones((16, *qat.output_shape[1:])), verbose=0)
    is_moved = [np.any(weight != old) for weight, old in zip(qat.weights, before, strict=False)]
    assert any(is_moved)
    keras_qat.freeze_batch_norm(qat)
    qat(data, training=True)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, data)
    assert report.identical == 1
    assert not report.float_operations
    for ending in ("keras", "h5"):
        path = tmp_path / f"qat.{ending}"
        qat.save(path)
        assert keras_qat.export_tflite(keras.models.load_model(path)) == contents


@pytest.mark.slow
def test_rounding_is_learned_for_variables_only():
    """Nothing can be assigned to a kernel that is computed."""
    x = keras.Input(SHAPE)
    model = keras.Model(x, layers.Conv2D(3, 1, name="last")(COMPUTED["normalized weights"](x)))
    data = images(8)
    (layer,) = keras_qat.sensitivity(model, data, bits=(4,)).layers
    assert layer.name == "last"
    qat = keras_qat.quantize_model(model, "int4_weights")
    keras_qat.calibrate(qat, data, method="mse")
    keras_qat.learn_rounding(qat, data, iterations=2)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data)
    assert report.identical == 1
