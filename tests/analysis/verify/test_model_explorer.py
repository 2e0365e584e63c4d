"""A report's figures on the nodes of Model Explorer."""

import json
import sys

import pytest

import keras_qat
from keras_qat.tflite.reader import FileGraph


def test_node_data_names_tensors_of_the_file(exported, tmp_path):
    """A node's figures are found by the name of a tensor that its operator computes."""
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
        for quantizer in near:  # Ranges are moved so that zero is a quantized value.
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
