"""Kernels that a layer computes from its weights: no tensors of the file, and not rounded."""

import pytest

import keras_qat
from tests.helpers import build_model, export_exact, images, keras, layers
from tests.networks.computed_kernels import COMPUTED

pytestmark = pytest.mark.legacy

SHAPE = (8, 8, 4)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COMPUTED)
def test_they_are_kernels_in_the_file(name):
    plan = keras_qat.plan(build_model(SHAPE, COMPUTED[name]))
    assert "WeightTensor" not in str(plan) and not plan.float_layers


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
    export_exact(qat, data)
