"""`kernels="onnxruntime"`: the model computes what onnxruntime computes of its file, by row."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.export.test_onnx import EXTRA, residual_block, run
from tests.helpers import build_model, images, keras, observe, scramble
from tests.ops.examples import EXAMPLES

REFUSED = {
    "gelu",
    "expm1",
    "log1p",
    "broadcast",
    "weight",
    "gru",
    "simple_rnn",
    "simple_rnn_relu",
    "conv_lstm",
    "lstm",
    "masked_lstm",
    "on_grid",
}
"""What tf2onnx writes no file of that runs, or writes in loops of float."""

UNQUANTIZED = {"indices", "reduce_all", "reduce_any"}
"""Nothing is quantized of models of indices or booleans."""

ON_HALVES = {"average_pooling", "resize_bilinear", "layer_norm"}
"""Computed in float, where the order of additions decides on halves: next to all codes."""

RESHAPED = {"einsum_dense_heads", "einsum_dense_per_tensor"}
"""tf2onnx reshapes the weights in the file, and onnxruntime quantizes these once more."""

ROWS = sorted(EXAMPLES.keys() - REFUSED - RESHAPED - UNQUANTIZED)


@pytest.fixture(autouse=True)
def packages():
    for package in ("onnx", "tf2onnx", "onnxruntime"):
        pytest.importorskip(package, reason=EXTRA)


def example(name, seed):
    """A quantized model of one operator, and inputs without halves."""
    numbers = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)
    drawn = EXAMPLES[name](numbers)
    dtypes = drawn.dtypes or ("float32",) * len(drawn.shapes)
    inputs = [
        keras.Input(shape, dtype=dtype) for shape, dtype in zip(drawn.shapes, dtypes, strict=True)
    ]
    qat = keras_qat.quantize_model(keras.Model(inputs, drawn.build(*inputs)))
    x = [
        np.float32(numbers.uniform(0.1, 3, (8, *shape)))
        if dtype == "float32"
        else numbers.integers(0, 3, (8, *shape)).astype(dtype)
        for shape, dtype in zip(drawn.shapes, dtypes, strict=True)
    ]
    observe(qat, *x)
    tensors = keras_qat.resolve(qat).inputs.values()
    return qat, [
        x if tensor.params is None else tensor.params.dequantize(tensor.params.quantize(x))
        for x, tensor in zip(x, tensors, strict=True)
    ]


def differences(qat, x, activations=None):
    """For each output, how many steps onnxruntime is from the model."""
    qat.kernels = "onnxruntime"
    contents = keras_qat.export_onnx(qat, activations=activations)
    there = run(contents, dict(zip(qat.input_names, x, strict=True)))
    here = tf.nest.flatten(qat.predict(x[0] if len(x) == 1 else x, verbose=0))
    tensors = keras_qat.resolve(qat).outputs
    assert list(there) == list(tensors)
    for (name, tensor), values in zip(tensors.items(), here, strict=True):
        scale = 1 if tensor.params is None else np.float64(tensor.params.scale)
        yield np.abs(np.round(there[name] / scale) - np.round(values / scale))


def check(name):
    qat, x = example(name, seed=1)
    for steps in differences(qat, x):
        if name in ON_HALVES:
            assert steps.max() <= 1
            assert np.mean(steps == 0) >= 0.9
        else:
            assert not steps.any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ROWS)
def test_operator(name):
    check(name)


def test_a_softmax_is_added_up_in_order():
    check("softmax")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "activations"), [("int8", "uint8"), ("symmetric", "int8")])
def test_network(recipe, activations):
    x = images(64, (12, 12, 3))
    qat = observe(keras_qat.quantize_model(residual_block(), recipe, kernels="onnxruntime"), x)
    (steps,) = differences(qat, [x], activations)
    assert not steps.any()
    simulated = keras_qat.simulate(qat, x, kernels="onnxruntime").outputs["logits"].values
    np.testing.assert_array_equal(simulated, qat.predict(x, verbose=0))
    qat.kernels = "xnnpack"  # Which rounds otherwise, so that the comparison shows something.
    simulated = keras_qat.simulate(qat, x, kernels="xnnpack").outputs["logits"].values
    np.testing.assert_array_equal(simulated, qat.predict(x, verbose=0))


def test_inputs_between_two_codes():
    """They are rounded to even by the file, and up by whoever feeds a TFLite file."""
    qat = keras_qat.quantize_model(build_model((256,), keras.layers.Reshape((16, 16))))
    x = (np.arange(256, dtype=np.float32)[None] - 128) * 2
    observe(qat, np.repeat(x, 3, 0))
    (tensor,) = keras_qat.resolve(qat).inputs.values()
    halves = (np.arange(256)[None] - 100.5).astype(np.float32) * tensor.params.scale
    (steps,) = differences(qat, [halves])
    assert not steps.any()
    to_even = qat.predict(halves, verbose=0)
    qat.kernels = "xnnpack"
    assert np.mean(to_even != qat.predict(halves, verbose=0)) > 0.3


@pytest.mark.slow
def test_groups_of_a_normalization():
    """They were taken for a convolution's, and the file normalized over all channels."""
    model = scramble(build_model((4, 4, 8), keras.layers.GroupNormalization(2)))
    x = images(16, (4, 4, 8))
    (steps,) = differences(observe(keras_qat.quantize_model(model), x), [x])
    assert steps.max() <= 1
