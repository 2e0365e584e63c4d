"""TFLite files converted to ONNX by tf2onnx, as docs/serving.md shows."""

import collections
import subprocess
import sys

import numpy as np
import pytest

import keras_qat
from tests.helpers import images, keras, observe, scramble
from tests.networks.small import layers

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("tf2onnx")


@pytest.mark.slow
def test_a_converted_file_computes_the_same_integers(tmp_path):
    image = x = keras.Input((12, 12, 3), name="image")
    x = shortcut = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(x)))
    x = layers.ReLU(6.0)(layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.Add()([layers.Conv2D(8, 1)(x), shortcut])
    x = layers.GlobalAveragePooling2D()(layers.MaxPooling2D()(layers.ReLU()(x)))
    model = scramble(keras.Model(image, layers.Dense(5, name="logits")(x)))
    data = images(32, (12, 12, 3))
    qat = observe(keras_qat.quantize_model(model), data)
    file, converted = tmp_path / "model.tflite", tmp_path / "model.onnx"
    keras_qat.export_tflite(qat, file, input_dtype="float32", output_dtype="float32")
    command = [sys.executable, "-m", "tf2onnx.convert", "--tflite", file, "--output", converted]
    subprocess.run([*command, "--opset", "17"], check=True)
    counts = collections.Counter(node.op_type for node in onnx.load(converted).graph.node)
    assert counts["QuantizeLinear"] >= 7
    session = runtime.InferenceSession(converted)
    (name,) = (given.name for given in session.get_inputs())
    outputs = [session.run(None, {name: data[i : i + 1]})[0] for i in range(len(data))]
    steps = np.abs(np.concatenate(outputs) - qat.predict(data, verbose=0))
    (tensor,) = keras_qat.resolve(qat).outputs.values()
    assert np.mean(steps < 0.3 * tensor.params.scale) > 0.99
    assert steps.max() < 1.5 * tensor.params.scale
