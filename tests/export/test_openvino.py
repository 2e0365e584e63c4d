"""`kernels="openvino"`: files for it, and what OpenVINO computes of them where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.arithmetic.kernel_families import OPENVINO
from keras_qat.keras2.backend import keras
from keras_qat.ops.all_ops import ROWS as ALL_ROWS
from tests.export.test_onnx import EXTRA, residual_block
from tests.export.test_onnxruntime import example
from tests.helpers import images, observe, scramble

layers = keras.layers
ROWS = sorted(OPENVINO.operators)


@pytest.fixture(autouse=True)
def packages():
    for package in ("onnx", "tf2onnx"):
        pytest.importorskip(package, reason=EXTRA)


def strided():
    """Strided 1x1 convolutions beside each other, and the sum of what they return."""
    x = inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    branch = layers.Conv2D(8, 1, strides=2, activation="relu")(x)
    branch = layers.Conv2D(32, 3, padding="same")(branch)
    x = layers.ReLU()(layers.Add()([layers.Conv2D(32, 1, strides=2)(x), branch]))
    x = layers.GlobalAveragePooling2D()(layers.DepthwiseConv2D(3)(x))
    return scramble(keras.Model(inputs, layers.Dense(10, name="logits")(x)))


def differences(qat, *x):
    """For each output, how many steps OpenVINO is from the model."""
    openvino = pytest.importorskip("openvino", reason="pip install openvino")
    qat.kernels = "openvino"
    processor = Path("/proc/cpuinfo")
    if not processor.exists() or "avx512_vnni" not in processor.read_text():
        pytest.skip("its kernels for other processors were not looked at")
    core = openvino.Core()
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    file = core.compile_model(core.read_model(keras_qat.export_onnx(qat)), "CPU", hints)
    there = file(dict(zip(qat.input_names, x, strict=True)))
    here = tf.nest.flatten(qat.predict(x[0] if len(x) == 1 else list(x), verbose=0))
    for index, (tensor, values) in enumerate(
        zip(keras_qat.resolve(qat).outputs.values(), here, strict=True)
    ):
        scale = 1 if tensor.params is None else np.float64(tensor.params.scale)
        yield np.abs(np.round(there[index] / scale) - np.round(values / scale))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ROWS)
def test_operator(name):
    qat, x = example(name, seed=1)
    for steps in differences(qat, *x):
        assert not steps.any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("recipe", ["int8", "symmetric"])
@pytest.mark.parametrize("build", [residual_block, strided])
def test_network(build, recipe):
    x = images(64, (12, 12, 3))
    (steps,) = differences(observe(keras_qat.quantize_model(build(), recipe), x), x)
    assert not steps.any()


def test_poolings_keep_operators_apart():
    """Two behind convolutions that are added, and two with the strides of convolutions."""
    import onnx

    qat = observe(keras_qat.quantize_model(strided(), kernels="openvino"), images(8, (12, 12, 3)))
    nodes = onnx.load_from_string(keras_qat.export_onnx(qat)).graph.node
    strides = [
        list(option.ints)
        for node in nodes
        if node.op_type in ("Conv", "MaxPool")
        for option in node.attribute
        if option.name == "strides"
    ]
    assert strides.count([2, 2]) == 2
    poolings = {node.output[0] for node in nodes if node.op_type == "MaxPool"}
    assert len(poolings) == 4
    qat.kernels = "onnxruntime"
    nodes = onnx.load_from_string(keras_qat.export_onnx(qat)).graph.node
    assert not [node for node in nodes if node.op_type == "MaxPool"]


def test_other_operators_are_refused():
    inputs = keras.Input((8, 8, 3))
    pooled = layers.AveragePooling2D(name="pooled")(inputs)
    qat = observe(
        keras_qat.quantize_model(keras.Model(inputs, pooled), kernels="openvino"),
        images(8, (8, 8, 3)),
    )
    with pytest.raises(ValueError, match=r"'quant_pooled' \(average_pooling\)"):
        keras_qat.export_onnx(qat)
    qat.kernels = "onnxruntime"
    keras_qat.export_onnx(qat)


def test_signed_activations_are_refused():
    qat = observe(keras_qat.quantize_model(residual_block(), "symmetric"), images(8, (12, 12, 3)))
    qat.kernels = "openvino"
    with pytest.raises(ValueError, match="rounds uint8, not int8"):
        keras_qat.export_onnx(qat, activations="int8")


def test_operators_are_rows():
    assert {op.name for op in ALL_ROWS} >= OPENVINO.operators
