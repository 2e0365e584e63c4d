"""`kernels="esp_dl"` computes exactly and rounds halves up; with powers of two there are many."""

import numpy as np
import pytest

import keras_qat
from keras_qat import recipes
from tests.helpers import keras, observe, scramble
from tests.networks.small import functional, layers

X = np.random.default_rng(0).normal(size=(64, 12)).astype(np.float32)


def build(x):
    y = layers.Dense(8, name="dense")(x)
    z = layers.Dense(8, use_bias=False, name="other")(x)
    total = layers.Add(name="total")([y, z])
    return layers.Multiply(name="product")([total, y])


@pytest.fixture(scope="module")
def qat():
    keras.utils.set_random_seed(1)
    model = scramble(functional((12,), build=build))
    return observe(keras_qat.quantize_model(model, recipes.power_of_two()), X)


def codes(reals, scale, rounded):
    return np.clip(rounded(reals / np.float64(scale)), -128, 127)


def up(x):
    return np.floor(x + 0.5)


@pytest.mark.parametrize(("kernels", "rounded"), [("esp_dl", up), ("onnxruntime", np.rint)])
def test_values_are_those_of_exact_arithmetic(qat, kernels, rounded):
    simulation = keras_qat.simulate(qat, X, kernels)
    nodes = {node.call.name.removeprefix("quant_"): node for node in keras_qat.resolve(qat).nodes}
    scales = {name: float(node.output.params.scale) for name, node in nodes.items()}
    (read,) = keras_qat.resolve(qat).inputs.values()
    x = np.clip(rounded(X / np.float64(read.params.scale)), -128, 127) * float(read.params.scale)
    reals = {}
    for name in ("dense", "other"):
        weights = nodes[name].weights
        kernel = np.float64(weights.q) * np.float64(weights.scale)
        reals[name] = x @ kernel
        if weights.bias is not None:
            step = float(read.params.scale) * float(np.ravel(weights.scale)[0])
            reals[name] = reals[name] + np.float64(weights.bias) * step
    values = {n: codes(reals[n], scales[n], rounded) * scales[n] for n in ("dense", "other")}
    total = codes(values["dense"] + values["other"], scales["total"], rounded) * scales["total"]
    product = codes(total * values["dense"], scales["product"], rounded)
    (output,) = simulation.outputs.values()
    np.testing.assert_array_equal(output.codes, product)


def test_halves_are_many(qat):
    """So that the rounding of halves is what the test above shows."""
    one, other = (
        next(iter(keras_qat.simulate(qat, X, kernels).outputs.values())).codes
        for kernels in ("esp_dl", "onnxruntime")
    )
    assert np.mean(one != other) > 0.02


def test_predict_computes_the_same(qat):
    qat.kernels = "esp_dl"
    simulated = next(iter(keras_qat.simulate(qat, X, "esp_dl").outputs.values())).values
    np.testing.assert_array_equal(qat.predict(X, verbose=0), simulated)
    qat.kernels = "xnnpack"
