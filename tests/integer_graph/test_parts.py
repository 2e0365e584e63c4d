"""Models of parts of quantization-aware models: cut, extended, inside another one."""

from __future__ import annotations

import numpy as np
import pytest

import keras_qat
from keras_qat.frontend.keras2.backend import keras
from tests.helpers import images, observe, scramble
from tests.networks.small import layers, residual_net


@pytest.fixture(scope="module")
def qat():
    return observe(keras_qat.quantize_model(scramble(residual_net())), images(96, (8, 8, 1)))


def cut(qat):
    return keras.Model(qat.input, qat.get_layer("quant_pool").output)


def with_a_head(qat):
    features = qat.get_layer("quant_flatten").output
    return keras.Model(qat.input, layers.Softmax()(layers.Dense(4, name="head")(features)))


def inside(qat):
    x = keras.Input((8, 8, 1))
    return keras.Model(x, layers.Reshape((1, 3))(qat(2.0 * x)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", [cut, with_a_head, inside])
@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
def test_parts_are_exported_and_simulated(qat, part, kernels):
    model, x = part(qat), images(64, (8, 8, 1))
    contents = keras_qat.export_tflite(model)
    assert keras_qat.read_metadata(contents)["recipe"]["name"] == "int8"
    simulated = keras_qat.simulate(model, x, kernels)
    file = keras_qat.tflite.interpreter.FileInterpreter(contents, kernels)
    outputs = file.run({model.input_names[0]: x})
    for name, output in simulated.outputs.items():
        codes = getattr(output, "codes", output)
        np.testing.assert_allclose(outputs[name], codes, atol=1e-6)
    assert keras_qat.verify(model, contents, x).outputs[0].max_difference <= 2


def test_the_graph_can_be_read(qat):
    text = str(keras_qat.resolve(qat))
    assert "quant_stem: conv" in text and "merged ReLU up to inf" in text
    assert "weights [3, 3, 1, 6] of 8 bits per channel, bias" in text
    assert text.startswith("inputs: image [None, 8, 8, 1] (int8 x 0.0")


@pytest.mark.slow
def test_inference_in_either_family(qat):
    x = images(64, (8, 8, 1))
    contents = keras_qat.export_tflite(qat)
    for kernels in ("reference", "xnnpack"):
        qat.kernels = kernels
        report = keras_qat.verify(qat, contents, x, kernels=kernels, per_layer=True)
        assert report.identical == 1
        assert not report.differing
        copy = type(qat).from_config(qat.get_config())
        assert copy.kernels == kernels
    with pytest.raises(ValueError, match="kernels='gpu': use one of 'xnnpack'"):
        qat.kernels = "gpu"


def test_a_layer_on_what_has_no_range_computes_in_float(qat):
    x, layer = keras.Input((8, 8, 1)), qat.get_layer("quant_stem")
    model, data = keras.Model(x, layer(x)), images(8, (8, 8, 1))
    assert [*keras_qat.summary(model).in_float.values()] == ["its input has no quantizer"]
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(model))
    np.testing.assert_allclose(file.predict(data), model.predict(data, verbose=0), atol=1e-5)


def test_biases_are_rounded_to_the_nearest_step(qat):
    (node,) = (node for node in keras_qat.resolve(qat).nodes if node.name == "quant_stem")
    step = node.inputs[0].params.scale * node.weights.scale.reshape(-1)
    weights = {
        weight.name.split("/")[-1].split(":")[0]: weight.numpy().astype(np.float64)
        for weight in qat.get_layer("quant_stem").weights
    }
    deviation = np.sqrt(weights["moving_variance"] + 1e-3)
    bias = weights["beta"] - weights["moving_mean"] * weights["gamma"] / deviation
    assert np.abs(node.weights.bias - bias / step).max() <= 0.51
