"""Tests the ONNX file: results of onnxruntime, with and without integer kernels."""

import collections
import json
import sys

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import images, keras, observe, scramble, train
from tests.networks.convolutional import FAMILIES
from tests.networks.small import functional, layers, out_of_order, residual_net

EXTRA = "needs the extra: pip install 'keras-qat[onnx]' onnxruntime"


@pytest.fixture
def onnx():
    pytest.importorskip("tf2onnx", reason=EXTRA)
    return pytest.importorskip("onnx", reason=EXTRA)


def run(contents, inputs, integers=True, optimized=None):
    """Returns outputs by name, computed with integer kernels, or with each operation in float."""
    runtime = pytest.importorskip("onnxruntime", reason=EXTRA)
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    # Otherwise CPUs with AVX2 and without VNNI sum products in 16 bits, which saturate.
    options.add_session_config_entry("session.x64quantprecision", "1")
    if optimized:
        options.optimized_model_filepath = str(optimized)
    if not integers:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(contents, options)
    names = [get_output.name for get_output in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


def differences(qat, contents, *inputs, integers=True):
    """Returns how many steps each output is from the simulation, in 256ths of its values' range."""
    expected = qat.predict(inputs[0] if len(inputs) == 1 else list(inputs), verbose=0)
    expected = expected if isinstance(expected, list) else [expected]
    outputs = run(contents, dict(zip(qat.input_names, inputs, strict=True)), integers)
    assert list(outputs) == qat.output_names
    return {
        name: np.abs(outputs[name] - values) / (np.ptp(values) / 255)
        for name, values in zip(qat.output_names, expected, strict=True)
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("integers", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["conv", "depthwise", "dense", "dense_3d", "concatenations"])
def test_structures(onnx, family, integers):
    qat = keras_qat.quantize_model(scramble(FAMILIES[family].model()))
    inputs = FAMILIES[family].inputs()
    observe(qat, *inputs)
    contents = keras_qat.export_onnx(qat)
    for name, steps in differences(qat, contents, *inputs, integers=integers).items():
        assert np.mean(steps < 0.3) >= 0.998, name
        assert steps.max() < 1.7, name


def test_trained_model(onnx, tmp_path):
    x = images(96, (8, 8, 1))
    qat = train(keras_qat.quantize_model(residual_net()), x, steps=24)
    path = tmp_path / "model.onnx"
    contents = keras_qat.export_onnx(qat, path)
    assert path.read_bytes() == contents
    for integers in (True, False):
        steps = differences(qat, contents, x, integers=integers)["logits"]
        assert np.mean(steps < 0.3) >= 0.99
        assert steps.max() < 1.7
    # Every kernel and bias consists of integers.
    model = onnx.load_from_string(contents)
    types = {constant.name: constant.data_type for constant in model.graph.initializer}
    makers = {node.output[0]: node for node in model.graph.node}
    kernels = [node for node in model.graph.node if node.op_type in ("Conv", "MatMul")]
    assert len(kernels) == 4
    for node in kernels:
        assert types[makers[node.input[1]].input[0]] == onnx.TensorProto.INT8
        if len(node.input) > 2:
            assert types[makers[node.input[2]].input[0]] == onnx.TensorProto.INT32
    counts = collections.Counter(node.op_type for node in model.graph.node)
    assert counts["QuantizeLinear"] == 8  # The input, and each operator's output.
    notes = {entry.key: entry.value for entry in model.metadata_props}
    assert notes["keras_qat"] == keras_qat.__version__
    assert keras_qat.recipes.Recipe.from_config(json.loads(notes["recipe"])) == qat.recipe


def residual_block() -> keras.Model:
    image = x = keras.Input((12, 12, 3), name="image")
    x = shortcut = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(x)))
    x = layers.ReLU(6.0)(layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.Add()([layers.Conv2D(8, 1)(x), shortcut])
    x = layers.MaxPooling2D()(layers.ReLU()(x))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="relu")(x))
    return scramble(keras.Model(image, layers.Dense(5, name="logits")(x)))


def test_onnxruntime_computes_all_layers_in_integers(onnx, tmp_path):
    qat = observe(keras_qat.quantize_model(residual_block()), images(32, (12, 12, 3)))
    contents = keras_qat.export_onnx(qat)
    run(contents, {"image": images(1, (12, 12, 3))}, optimized=tmp_path / "optimized.onnx")
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    counts = collections.Counter(node.op_type for node in nodes)
    assert counts["QLinearConv"] == 4
    assert counts["QLinearAdd"] == counts["QLinearGlobalAveragePool"] == counts["QGemm"] == 1
    in_float = {"Conv", "FusedConv", "Add", "Relu", "Clip", "MatMul", "Gemm", "GlobalAveragePool"}
    assert not in_float & counts.keys()


@pytest.mark.slow
def test_symmetric(onnx):
    model = residual_block()
    outputs = [model.output, layers.Softmax(name="classes")(model.output)]
    model = keras.Model(model.input, outputs)
    x = images(64, (12, 12, 3))
    qat = observe(keras_qat.quantize_model(model, "symmetric"), x)
    graph = keras_qat.resolve(qat)
    assert {tensor.params.zero_point for tensor in graph.tensors.values()} == {0}
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1.0
    contents = keras_qat.export_onnx(qat)
    proto = onnx.load_from_string(contents).graph
    types = {array.name: array.data_type for array in proto.initializer}
    quantizing = [n for n in proto.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    # TensorRT requires int8 and zero points of 0. Biases are float.
    assert {types[node.input[2]] for node in quantizing} == {onnx.TensorProto.INT8}
    arrays = {array.name: onnx.numpy_helper.to_array(array) for array in proto.initializer}
    assert not any(arrays[node.input[2]].any() for node in quantizing)
    steps = differences(qat, contents, x)["logits"]
    assert np.mean(steps < 0.3) >= 0.99
    assert steps.max() < 2.1


def test_type_of_activations(onnx, exported):
    for activations, least in (("uint8", 0), ("int8", -128)):
        proto = onnx.load_from_string(
            keras_qat.export_onnx(exported.model, activations=activations)
        )
        arrays = {array.name: array for array in proto.graph.initializer}
        points = {node.input[2] for node in proto.graph.node if node.op_type == "QuantizeLinear"}
        dtypes = {onnx.numpy_helper.to_array(arrays[name]).dtype.name for name in points}
        assert dtypes == {activations}
        assert min(onnx.numpy_helper.to_array(arrays[name]) for name in points) == least
    with pytest.raises(ValueError, match="use 'uint8' or 'int8'"):
        keras_qat.export_onnx(exported.model, activations="int16")


def test_order_and_names(onnx):
    qat = keras_qat.quantize_model(scramble(out_of_order()))
    x = [images(64, (6,), 1), images(64, (4,), 2)]
    observe(qat, *x)
    result = differences(qat, keras_qat.export_onnx(qat), *x)
    assert max(item.max() for item in result.values()) < 1.7


def test_fewer_bits(onnx):
    recipe = keras_qat.recipes.int8(weight_bits=4, activation_bits=4)
    qat = keras_qat.quantize_model(
        scramble(functional((8, 8, 4), build=layers.Conv2D(6, 3))), recipe
    )
    x = images(64)
    observe(qat, x)
    (steps,) = differences(qat, keras_qat.export_onnx(qat), x).values()
    assert np.mean(steps < 1) >= 0.999  # 16 of 256 levels are used.


@pytest.mark.slow
@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_recurrent_layers(onnx, kind):
    """In a loop, tf2onnx omitted an LSTM's states, and onnxruntime crashed on a GRU."""
    qat = keras_qat.quantize_model(scramble(functional((4, 3), build=kind(5, go_backwards=True))))
    x = images(64, (4, 3))
    observe(qat, x)
    contents = keras_qat.export_onnx(qat)
    assert not any(node.op_type == "Loop" for node in onnx.load_from_string(contents).graph.node)
    (steps,) = differences(qat, contents, x).values()
    assert np.mean(steps < 0.3) >= 0.9  # A step that is rounded differently affects later steps.
    assert np.mean(steps < 2.5) >= 0.99  # Up to 3 steps, in one of 320 values of a GRU.


def test_operations_that_tf2onnx_does_not_know(onnx):
    qat = keras_qat.quantize_model(functional((4,), build=tf.nn.gelu))
    observe(qat, images(8, (4,)))
    with pytest.raises(ValueError, match=r"tf2onnx does not support all .*: No Op .* for Erfc"):
        keras_qat.export_onnx(qat)


def test_16_bits(onnx):
    qat = observe(keras_qat.quantize_model(residual_net(), "int16x8"), images(8, (8, 8, 1)))
    with pytest.raises(ValueError, match="16-bit activations"):
        keras_qat.export_onnx(qat)


def test_without_the_extra(exported, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'keras-qat\[onnx\]'"):
        keras_qat.export_onnx(exported.model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
