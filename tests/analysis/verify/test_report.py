"""Tests the findings of `verify`, in its report and in Model Explorer."""

import json
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.reader import FileGraph
from tests.helpers import images, observe, quantize_on, scramble
from tests.networks.small import functional, layers


def test_reports_what_numpy_counts(exported):
    file = FileInterpreter(exported.tflite)
    codes = file.run({"image": exported.x})["logits"]
    end = file.outputs["logits"]
    expected = exported.model.predict(exported.x, verbose=0)
    differences = np.abs(codes - (np.round(expected / end.scale) + end.zero_point))
    (report,) = keras_qat.verify(exported.model, exported.tflite, exported.x).outputs
    assert report.identical == np.mean(differences == 0)
    assert report.max_difference == differences.max()
    assert report.mean_difference == pytest.approx(differences.mean())
    agreement = np.mean(codes.argmax(-1) == expected.argmax(-1))
    assert report.argmax_agreement == agreement


def test_says_what_quantization_costs(exported):
    """In both cases file and model are the same. The model with a far too wide range is useless."""
    (good,) = keras_qat.verify(exported.model, exported.tflite, exported.x).outputs
    assert good.float_sqnr > 10 and good.float_argmax_agreement > 0.9
    qat = quantize_on(exported.float_model, 1000 * exported.x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), exported.x)
    assert report.identical == 1
    assert report.outputs[0].float_sqnr < good.float_sqnr - 10
    assert "logits against the float model: same argmax in" in str(report)


def test_says_that_a_file_is_float(exported):
    converter = tf.lite.TFLiteConverter.from_keras_model(exported.float_model)
    with pytest.warns(UserWarning, match="none of its tensors is quantized"):
        report = keras_qat.verify(exported.model, converter.convert(), exported.x)
    assert "The file computes in float" in str(report).replace("\n  ", " ")
    assert ";" not in str(report)  # The converter joins the names of layers that it fuses.


def test_takes_a_path_and_both_kinds_of_kernels(exported, tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(exported.tflite)
    fast = keras_qat.verify(exported.model, path, exported.x, batch_size=7)
    assert str(fast) == str(keras_qat.verify(exported.model, exported.tflite, exported.x))
    other = keras_qat.verify(exported.model, path, exported.x, kernels="optimized")
    assert other.outputs[0].argmax_agreement >= 0.95
    try:  # The reference kernels round differently, and the model can do so, too.
        exported.model.kernels = "reference"
        reference = keras_qat.verify(exported.model, path, exported.x, kernels="reference")
    finally:
        exported.model.kernels = "xnnpack"
    assert (reference.identical, reference.max_difference) == (1, 0)


def test_steps_of_an_output_without_argmax():
    qat = keras_qat.quantize_model(scramble(functional((4,), build=layers.Dense(1))))
    x = images(64, (4,))
    observe(qat, x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x)
    assert report.outputs[0].argmax_agreement is None
    assert any(line.endswith(" -") for line in str(report).splitlines())


@pytest.mark.parametrize("contents", [b"", b"something else that is long enough"])
def test_no_tflite_file(exported, contents, tmp_path):
    with pytest.raises(ValueError, match="not a TFLite file"):
        keras_qat.verify(exported.model, contents, exported.x)
    path = tmp_path / "model.tflite"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"model\.tflite is not a TFLite file"):
        keras_qat.verify(exported.model, path, exported.x)


def test_file_of_another_model(exported):
    qat = keras_qat.quantize_model(functional((4,), build=layers.Dense(2)))
    with pytest.raises(ValueError, match="belongs to another model"):
        keras_qat.verify(qat, exported.tflite, images(8, (4,)))


PRODUCTS: dict[str, Any] = {
    "matmul": lambda x: tf.matmul(x, layers.ReLU()(x), transpose_b=True),
    "dot": lambda x: layers.Dot(2)([x, layers.Concatenate(1)([x, 0.3 * x])]),
    "dot_normalized": lambda x: layers.Dot(2, normalize=True)([layers.ReLU()(x), x]),
    "weights_last": lambda x: layers.Dot(1)([x, layers.Softmax(1)(layers.Dense(2)(x))]),
    "matmul_of_gates": lambda x: tf.matmul(x, layers.Permute((2, 1))(tf.sigmoid(x))),
    "einsum_of_gates": lambda x: tf.einsum("btd,bsd->bts", x, tf.sigmoid(x)),
    "attention": lambda x: layers.MultiHeadAttention(2, 8)(x, x),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("runtime", ["tensorflow", None])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_tensors_in_every_runtime(name, runtime):
    """XNNPACK of TensorFlow 2.21 assumes that the second factor's zero point is 0."""
    x = 1 + images(48, (20, 16))
    qat = observe(keras_qat.quantize_model(functional((20, 16), build=PRODUCTS[name])), x)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x, runtime=runtime).identical == 1


def test_node_data_names_tensors_of_the_file(exported, tmp_path):
    """A node's figures have the name of a tensor that the node's operator computes."""
    report = keras_qat.verify(exported.model, exported.tflite, exported.x[:16], per_layer=True)
    paths = report.to_model_explorer(tmp_path / "figures")
    data = {path.stem: json.loads(path.read_text())["results"] for path in paths}
    file = FileGraph(exported.tflite)
    made = {file.tensors[index].name for step in file.operations for index in step.outputs}
    inputs = {tensor.name for tensor in file.inputs.values()}
    quantizers = keras_qat.quantizers(exported.model)
    for tensor in report.tensors:
        assert tensor.tensor in made | inputs
        assert data["bits"][tensor.tensor]["value"] == 8
        assert data["identical_percent"][tensor.tensor]["value"] == 100 * tensor.run.identical
        if tensor.sqnr is not None:
            noise = data["signal_to_noise_db"][tensor.tensor]["value"]
            assert noise == pytest.approx(tensor.sqnr, abs=0.05)
        low, high = map(float, data["range"][tensor.tensor]["value"].split(" to "))
        near = [q for q in quantizers if tensor.name in q.quantizes]
        for quantizer in near:  # Ranges are moved to make zero a quantized value.
            step = (high - low) / 255
            assert low == pytest.approx(float(quantizer.minimum), abs=2 * step)
            assert high == pytest.approx(float(quantizer.maximum), abs=2 * step)
    assert any(tensor.name in q.quantizes for q in quantizers for tensor in report.tensors)


def test_what_it_needs(exported, tmp_path, monkeypatch):
    report = keras_qat.verify(exported.model, exported.tflite, exported.x[:4])
    with pytest.raises(ValueError, match="per_layer=True"):
        report.to_model_explorer(tmp_path)
    report = keras_qat.verify(exported.model, exported.tflite, exported.x[:4], per_layer=True)
    monkeypatch.setitem(sys.modules, "model_explorer", None)
    with pytest.raises(ImportError, match="pip install ai-edge-model-explorer"):
        report.to_model_explorer(tmp_path, show=tmp_path / "model.tflite")


def test_sees_a_change_of_one_weight(exported):
    """A bias that is three steps off changes one class's values by about three."""
    other = keras_qat.quantize_model(exported.model)
    step = keras_qat.quantizers(other)[-1]
    dense = other.get_layer("quant_logits").layer
    shift = 3 * (step.maximum - step.minimum) / 255
    dense.bias.assign(dense.bias + np.array([shift, 0, 0], np.float32))
    with pytest.warns(UserWarning, match="other weights or ranges"):
        report = keras_qat.verify(other, exported.tflite, exported.x)
    assert report.identical < 0.75
    assert 3 <= report.max_difference <= 4
