"""Tests that versions of operators equal those in files that TensorFlow reads and writes again."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.lite.python.convert import mlir_sparsify

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.keras2.backend import keras, register
from keras_qat.ops.registry import op_named, register_op
from keras_qat.tflite.schema import OPERATORS, TYPES, operator_code, unpack
from tests.ops.harness import file_of, make_node, node_of, with_ends
from tests.ops.test_contracts import MATCHING
from tests.ops.test_movement import calls_of

LOWER = "DEPTH_TO_SPACE"
"""TensorFlow writes its version 2, which TFLite's reference kernels do not support."""


def versions(contents: bytes) -> dict[str, int]:
    """Returns the highest version of each operator. TensorFlow writes no other."""
    codes: list[Any] = sorted(unpack(contents).operatorCodes, key=lambda code: code.version)
    return {OPERATORS[operator_code(code)]: code.version for code in codes}


def oldest_runtime(contents: bytes) -> list[int]:
    """Returns the TensorFlow Lite version that a file requires."""
    model = unpack(contents)
    (buffer,) = (entry.buffer for entry in model.metadata if entry.name == b"min_runtime_version")
    text = bytes(model.buffers[buffer].data).rstrip(b"\0").decode()
    return [int(part) for part in text.split(".")] if text else []


def has_int16(contents: bytes) -> bool:
    return any(tensor.type == TYPES["int16"] for tensor in unpack(contents).subgraphs[0].tensors)


@pytest.mark.sample(20)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("op", MATCHING, ids=lambda op: op.name)
def test_versions_are_tensorflows(op, bits):
    """Skips examples in which TensorFlow merges two operators."""
    if op.has_kernel_for(bits):
        assert_tensorflows(file_of(node_of(op, bits, 0)[0]))


def test_depth_to_space_has_its_first_version():
    contents = file_of(node_of(op_named("depth_to_space"), 8, 0)[0])
    assert versions(contents) == {LOWER: 1}
    assert oldest_runtime(contents) == [2, 1, 0]


@pytest.mark.parametrize("name", ["split", "gather"])
def test_versions_of_other_options(name):
    for seed in range(1, 4):
        assert_tensorflows(file_of(node_of(op_named(name), 8, seed)[0]))


OTHERWISE = {
    **{"CONV_2D": {4, 6}, "UNIDIRECTIONAL_SEQUENCE_LSTM": {1}},
    **{"ADD": {3}, "SUB": {5}, "DEPTHWISE_CONV_2D": {5}},
    **{"STRIDED_SLICE": {2}, "REVERSE_V2": {3}, "TILE": {3}},
}
"""Versions of 16-bit operators that differ from TensorFlow's.

They are higher for other biases and kernels. They are lower because no file tells TensorFlow which
scales are powers of two.
"""

LATER = {"QUANTIZE": [2, 2, 0], "HARD_SWISH": [2, 0, 0], "LEAKY_RELU": [2, 3, 0]}
"""Operators that older runtimes have according to TensorFlow, and the versions in files."""


def assert_tensorflows(contents: bytes) -> None:
    written = bytes(mlir_sparsify(contents))
    ours, theirs = versions(contents), versions(written)
    if ours == theirs:  # Version 1.14 is the first with int8.
        least = max([1, 14, 0], oldest_runtime(written))
        later = [LATER[name] for name in ours.keys() & LATER]
        assert least <= oldest_runtime(contents) <= max([least, *later])
    for name in (ours.keys() & theirs.keys()) - {LOWER}:
        otherwise = OTHERWISE.get(name, set()) if has_int16(contents) else set()
        assert ours[name] in {theirs[name], *otherwise}, name


@register
class Moves(keras.layers.Layer):
    """Movements that TFLite's converter writes."""

    def call(self, x):
        rest = [[0, 0]] * (len(x.shape) - 2)
        sizes = tf.shape(x)
        return [
            tf.tile(x, [1, 2] + [1] * len(rest)),
            tf.slice(x, 0 * sizes, sizes - 1),
            tf.split(x, [1, 3], 1)[0],
            tf.pad(x, [[0, 0], [1, 0], *rest], constant_values=0.0),
            tf.minimum(x, x[:, :1]),
            tf.maximum(x, x[:, 1:2]),
            tf.reverse(x, [1]),
        ]


@register
class Begins(keras.layers.Layer):
    """A movement that TFLite's converter writes as SLICE."""

    def call(self, x):
        return tf.slice(x, 0 * tf.shape(x), tf.shape(x) - 1)


@pytest.mark.parametrize("axes", [4, 5])
def test_runtimes_of_slices_alone(axes):
    with register_op(Begins, "move"):
        (call,) = calls_of(Begins(), (4, 2, 3, 2)[: axes - 1])
        contents = file_of(make_node(call, 8, np.random.default_rng(0)))
    assert "SLICE" in versions(contents)
    assert_tensorflows(contents)
    assert oldest_runtime(contents)[:2] == ([2, 5] if axes == 5 else [1, 14])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("axes", [4, 5])
def test_versions_of_what_the_converter_writes(axes, bits):
    with register_op(Moves, "move"):
        (call,) = calls_of(Moves(), (4, 2, 3, 2)[: axes - 1])
        contents = file_of(make_node(call, bits, np.random.default_rng(0)))
    assert {"TILE", "SLICE", "SPLIT_V", "REVERSE_V2"} <= versions(contents).keys()
    assert_tensorflows(contents)


@pytest.mark.parametrize(
    ("name", "maximum"),
    [("transpose_conv", None), ("transpose_conv", 6.0), ("resize_bilinear", None)],
)
def test_options_that_raise_a_version(name, maximum):
    (op,) = (op for op in MATCHING if op.name == name)
    for seed in range(4):
        assert_tensorflows(file_of(node_of(op, 8, seed, maximum)[0]))


@pytest.mark.parametrize(
    ("name", "seed", "version", "runtime"),
    [
        *(("leaky_relu", 0, 2, [2, 3, 0]), ("subtract", 0, 5, [2, 4, 0])),
        *(("mirror_pad", 0, 3, [2, 12, 0]), ("depthwise_conv", 0, 5, [2, 3, 0])),
        pytest.param("conv", 2, 4, [2, 3, 0], id="conv"),
        pytest.param("conv", 0, 6, [2, 9, 0], id="conv of groups"),
    ],
)
def test_operators_of_16_bits(name, seed, version, runtime):
    """TensorFlow lowers the version of an operator that it mistakes for a difference.

    It uses version 8 for convolutions, which is for biases of other types than int64.
    """
    (op,) = (op for op in MATCHING if op.name == name)
    contents = file_of(node_of(op, 16, seed)[0])
    assert list(versions(contents).values()) == [version]
    assert oldest_runtime(contents) == runtime
    (graph,) = unpack(contents).subgraphs
    (operator,) = graph.operators
    if "conv" in name:
        assert graph.tensors[operator.inputs[2]].type == TYPES["int64"]
    assert not getattr(operator.builtinOptions, "quantizedBiasType", 0)


@pytest.mark.parametrize("axes", [4, 5])
@pytest.mark.parametrize("function", [tf.subtract, tf.maximum, tf.minimum])
def test_tensors_of_many_axes_and_of_few(function, axes):
    (call,) = calls_of(lambda x: function(x, np.float32([1.0, 2.0])), (2,) * (axes - 1))
    contents = file_of(make_node(call, 8, np.random.default_rng(0)))
    assert_tensorflows(contents)
    (version,) = versions(contents).values()
    assert (version >= 3) == (axes == 5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("axes", [4, 5, 6])
@pytest.mark.parametrize(
    ("most", "function"),
    [
        (6, lambda x: tf.transpose(x, [0, *range(len(x.shape) - 1, 0, -1)])),
        (5, lambda x: tf.pad(x, [[0, 0], [1, 0]] + [[0, 0]] * (len(x.shape) - 2))),
        (5, lambda x: x[:, 1:]),
    ],
    ids=["transpose", "pad", "slice"],
)
def test_movements_of_many_axes(most, function, axes):
    (call,) = calls_of(function, (2, 3, 2, 2, 2)[: min(axes, most) - 1])
    assert_tensorflows(file_of(make_node(call, 8, np.random.default_rng(0))))


@pytest.mark.parametrize(("ratio", "version"), [(0.5, 2), (1.0, 3), (2.0, 3)])
def test_products_that_are_not_made_smaller(ratio, version):
    node, _ = node_of(op_named("multiply"), 8, 0)
    ones = QuantParams(np.float32(1), 0)
    contents = file_of(with_ends(node, ones, ones, QuantParams(np.float32(1 / ratio), 0)))
    assert_tensorflows(contents)
    assert versions(contents) == {"MUL": version}
