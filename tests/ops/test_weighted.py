"""Tests weighted operators beyond the examples: large sums, variants, unknown sizes."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic.kernel_families import kernel_family
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.export.tflite_writer import get_tensor_index, write_node
from keras_qat.graph.read_model import read_model
from keras_qat.integer_graph.execute import compute_node
from keras_qat.integer_graph.passes import pack_node
from keras_qat.ops import conv, dense, weighted_sums
from keras_qat.ops.matmul import EXACT_DEPTH
from keras_qat.ops.node import Tensor
from keras_qat.ops.weighted_sums import RECENT
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.interpreter import FileInterpreter
from tests.comparison import KERNELS, RUNNABLE
from tests.helpers import keras, layers
from tests.ops.examples import EXAMPLES
from tests.ops.harness import assert_same, in_integers, make_node, random_inputs, with_ends

pytestmark = pytest.mark.legacy

ROWS = [
    *(conv.CONV, conv.DEPTHWISE_CONV, conv.TRANSPOSE_CONV, conv.AFFINE),
    *(dense.DENSE, dense.EINSUM_DENSE),
]


def call_of(layer, shape, batch=None, dtype="float32"):
    x = keras.Input(shape, batch_size=batch, dtype=dtype)
    (call,) = read_model(keras.Model(x, layer(x))).calls
    return call


def node_of(layer, shape, bits=8, seed=0, batch=None, dtype="float32"):
    numbers = np.random.default_rng(seed)
    return make_node(call_of(layer, shape, batch, dtype), bits, numbers), numbers


def with_weights(node, **changes):
    return dataclasses.replace(node, weights=dataclasses.replace(node.weights, **changes))


def operations(node):
    builder, indices = Builder(), {}
    ends = {tensor.name: get_tensor_index(builder, indices, tensor) for tensor in node.inputs}
    write_node(builder, node, indices)
    contents = builder.finish(ends, {"output_0": indices[node.output]})
    return [name for name, *_ in FileInterpreter(contents, "optimized").operations()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("channels", [1, 5, 8, 19])
def test_transposed_convolutions_of_a_known_number_of_images(channels, family):
    """XNNPACK computes these, with a scale for each channel."""
    for seed in range(4):
        for bits in (8, 16):
            layer = layers.Conv2DTranspose(channels, 3, strides=2, padding="same")
            node, numbers = node_of(layer, (4, 5, 6), bits, seed, batch=2)
            assert_same(node, random_inputs(node, numbers), family)
            assert operations(node) == ["TRANSPOSE_CONV"]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("layer", "shape", "found"),
    [
        (lambda: layers.Conv2D(4, 3, padding="same"), (None, None, 3), (6, 7, 3)),
        (lambda: layers.DepthwiseConv2D(3, 2, "same"), (None, None, 3), (6, 7, 3)),
        (lambda: layers.Conv1D(4, 3, padding="causal"), (None, 3), (6, 3)),
        (lambda: layers.DepthwiseConv1D(3, 2, "same"), (None, 3), (6, 3)),
        (lambda: layers.Conv2DTranspose(9, 3, 2), (None, None, 3), (4, 5, 3)),
        (lambda: layers.Conv1DTranspose(9, 3, 2, "same"), (None, 3), (4, 3)),
        (lambda: layers.Dense(4), (None, None, 3), (4, 5, 3)),
        (lambda: layers.BatchNormalization(), (None, 3), (4, 3)),
        (lambda: layers.BatchNormalization(), (None, None, 3), (4, 5, 3)),
    ],
)
@pytest.mark.parametrize("family", KERNELS)
def test_open_sizes(layer, shape, found, family):
    node, numbers = node_of(layer(), found)
    open_node, _ = node_of(layer(), shape)
    given = random_inputs(node, numbers)
    shapes = [open_node.inputs[0].shape, open_node.output.shape]
    node = with_ends(node, shapes=shapes, call=open_node.call)
    assert_same(node, given, family)
    if "Transpose" not in type(node.call.layer).__name__:
        assert not {"SHAPE", "STRIDED_SLICE", "PACK"} & set(operations(node))


LARGE = {
    "conv": (lambda: layers.Conv2D(3, 3), (5, 5, 200)),
    "transpose_conv": (lambda: layers.Conv2DTranspose(9, 3, 2), (3, 3, 600)),
    "transpose_conv_1d": (lambda: layers.Conv1DTranspose(2, 3, 2), (3, 1300)),
    "dense": (lambda: layers.Dense(5), (4000,)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("of", ["weights", "bias"])
def test_sums_and_biases_past_what_float32_holds(kind, of, family):
    """All products have the same sign, so sums grow; or a bias near 2^30 dominates."""
    layer, shape = LARGE[kind]
    node, numbers = node_of(layer(), shape)
    weights = node.weights
    if of == "weights":
        q = numbers.integers(100, 128, weights.q.shape).astype(np.float64)
        bias = weights.bias
        node = with_weights(node, q=q)
    else:
        q = numbers.integers(-1, 2, weights.q.shape).astype(np.float64)
        bias = numbers.integers(2**28, 2**30, weights.bias.shape).astype(np.float64)
        node = with_weights(node, q=q, bias=bias)
    scale = float(node.inputs[0].params.scale) * weights.scale.max()
    largest = np.abs(q).sum() / q.shape[-2 if "transpose" in kind else -1] * 100
    params = QuantParams.from_range(-1.0, (np.abs(bias).max() + largest) * scale)
    node = with_ends(node, node.inputs[0].params, params)
    inputs = random_inputs(node, numbers)
    assert_same(node, inputs, family)
    assert_same_in_graph(node, inputs, family)


LONG = {
    "depthwise_conv": (lambda: layers.DepthwiseConv1D(700), (702, 2)),
    "depthwise_conv_with_multiplier": (
        lambda: layers.DepthwiseConv1D(700, depth_multiplier=2),
        (702, 1),
    ),
}
"""Their sums would seem short if output channels were counted along another axis."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("kind", LARGE | LONG)
def test_large_sums_that_a_bias_takes_away(kind, family):
    """The remainder is as small as float32 errors; in transposed convolutions at some pixels."""
    layer, shape = (LARGE | LONG)[kind]
    node, numbers = node_of(layer(), shape)
    q = numbers.integers(100, 128, node.weights.q.shape).astype(np.float64)
    whole = q.transpose(*range(q.ndim - 2), -1, -2) if "transpose" in kind else q
    middle = whole[(1,) * (q.ndim - 2)] if "transpose" in kind else whole
    bias = -255 * middle.reshape(-1, node.weights.bias.size).sum(0)
    node = with_weights(
        node, q=q, bias=bias, scale=np.full_like(node.weights.scale, np.float32(0.01))
    )
    ends = (0.02, -128), (8 * 0.02 * 0.01, 127)
    node = with_ends(node, *(QuantParams(np.float32(scale), zero, 8) for scale, zero in ends))
    ((name, given),) = random_inputs(node, numbers).items()
    largest = numbers.choice([126, 127], given.shape, p=[0.004, 0.996])
    assert_same(node, {name: largest.astype(np.int8)}, family)


def assert_same_in_graph(node, inputs, family, **how):
    """Asserts that weights as tensors and as arrays have the same results."""

    @tf.function(autograph=False, **how)
    def compute(x, q, scale, bias):
        weights = dataclasses.replace(node.weights, q=q, scale=scale, bias=bias)
        computed = dataclasses.replace(node, weights=weights)
        return compute_node(computed, [x], kernel_family(family))

    (tensor,) = node.inputs
    x = inputs[tensor.name].astype(np.float64) - tensor.params.zero_point
    x = x if tensor.params.bits == 16 else x.astype(np.float32)
    weights = node.weights
    bias = None if weights.bias is None else tf.constant(weights.bias)
    (result,) = compute(tf.constant(x), tf.constant(weights.q), tf.constant(weights.scale), bias)
    (expected,) = in_integers(node, inputs, family)
    np.testing.assert_array_equal(result + node.output.params.zero_point, expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("jit", [False, True])
def test_in_graphs(row, family, bits, jit):
    for seed in range(3):
        numbers = np.random.default_rng(seed)
        example = EXAMPLES[row.name](numbers)
        node, numbers = node_of(example.build, *example.shapes, bits, seed)
        assert_same_in_graph(node, random_inputs(node, numbers), family, jit_compile=jit)


@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("bits", [8, 16])
def test_dense_as_a_convolution(bits, family):
    for shape in [(7,), (3, 7), (2, 3, 7), (2, 2, 3, 7)]:
        node, numbers = node_of(layers.Dense(9), shape, bits)
        node = dataclasses.replace(node, attributes={"form": "convolution"})
        assert_same(node, random_inputs(node, numbers), family)
        names = operations(node)
        assert set(names) <= {"CONV_2D", "RESHAPE"}
        assert len(names) == (1 if len(shape) == 3 else 3)


def test_dense_is_one_operator():
    if dense.FORM != "fully_connected":
        pytest.skip("this TensorFlow's runtime lacks the kernels")
    for shape in [(7,), (3, 7), (2, 3, 7), (2, 2, 3, 7)]:
        assert operations(node_of(layers.Dense(9), shape)[0]) == ["FULLY_CONNECTED"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("filters", [3, 8, 11])
@pytest.mark.parametrize(
    "kind", [layers.Conv2D, layers.Conv2DTranspose], ids=lambda kind: kind.__name__
)
def test_halves_of_each_channel(kind, filters, family):
    """TFLite rounds channels of transposed convolutions in eights, and the rest separately."""
    node, numbers = node_of(kind(filters, 1), (4, 3, 5))
    (x,), output, q = node.inputs, node.output, numbers.integers(-2, 3, node.weights.q.shape)
    scale = np.full_like(node.weights.scale, 2.0**-4)
    node = with_weights(node, q=q.astype(np.float64), scale=scale, bias=None)
    ends = [dataclasses.replace(item.params, scale=np.float32(0.5)) for item in (x, output)]
    node = with_ends(node, *ends)
    for shape in (output.shape, (None, None, *output.shape[2:])):
        example = with_ends(node, shapes=[x.shape, shape])
        assert_same(example, random_inputs(node, numbers), family)


@pytest.mark.parametrize("bits", range(2, 9))
def test_so_many_products_are_exact_in_float32_whatever_they_are(bits):
    arguments = SimpleNamespace(params=[QuantParams(np.float32(1), 0, bits)])
    count, largest = weighted_sums._most(arguments), (2**bits - 1) * 127
    assert count * largest < 2**24 <= (count + 1) * largest


def test_so_many_products_of_two_tensors_are_exact_in_float32():
    largest = 255**2
    assert EXACT_DEPTH * largest < 2**24 < (EXACT_DEPTH + 1) * largest


@pytest.mark.parametrize(("shape", "count"), [((4, 3, 2), 24), ((None, 3, 2), 6), ((), 1)])
def test_elements_of_one_example_or_of_a_known_batch(shape, count):
    assert Tensor("x", shape, "float32", None).elements == count


def test_elements_of_open_sizes_are_refused():
    with pytest.raises(ValueError, match=r"'x' is unknown: \[4, None, 2\]"):
        assert Tensor("x", (4, None, 2), "float32", None).elements


def test_embeddings_in_their_output_s_parameters():
    """Entries with the output's scale are rows of the file's table, whatever the scale is."""
    for seed in range(20):
        node, numbers = node_of(layers.Embedding(10, 4), (6,), seed=seed, dtype="int32")
        params = node.output.params
        low, high = (item - params.zero_point for item in (params.lowest, params.highest))
        q = numbers.integers(low, high + 1, (10, 4)).astype(np.float64)
        node = with_weights(node, q=q, scale=np.full((1, 1), params.scale, np.float64))
        indices = numbers.integers(0, 10, (3, 6)).astype(np.int32)
        (codes,) = in_integers(node, {node.inputs[0].name: indices}, "xnnpack")
        np.testing.assert_array_equal(codes, q[indices] + params.zero_point)


def test_embeddings_of_indices_in_float():
    node, _ = node_of(layers.Embedding(10, 4), (6,), dtype="int32")
    (tensor,) = node.inputs
    inputs = (Tensor(tensor.name, tensor.shape, "float32", None),)
    node = dataclasses.replace(node, inputs=inputs)
    assert operations(node) == ["CAST", "GATHER"]
    indices = np.float32([[0, 1, 2, 3, 4, 9]])
    assert_same(node, {tensor.name: indices}, "reference")


INT4 = {
    "conv": (lambda: layers.Conv2D(9, 3), (6, 6, 5)),
    "strides": (lambda: layers.Conv2D(16, 3, padding="same", strides=2), (7, 7, 8)),
    "pointwise": (lambda: layers.Conv2D(12, 1), (6, 6, 8)),
    "groups": (lambda: layers.Conv2D(8, 3, groups=2), (6, 6, 4)),
    "sequence": (lambda: layers.Conv1D(8, 3), (9, 4)),
    "dense": (lambda: layers.Dense(16), (24,)),
    "odd": (lambda: layers.Dense(7), (13,)),
    "steps": (lambda: layers.Dense(7), (5, 12)),
    "heads": (lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 8)), (5, 12)),
}


@pytest.mark.sample(6)
@pytest.mark.skipif(not RECENT, reason="this TensorFlow's runtime lacks the kernels")
@pytest.mark.parametrize("family", RUNNABLE)
@pytest.mark.parametrize("name", INT4)
def test_weights_of_four_bits(name, family):
    """Kernels for 4-bit weights differ from int8 kernels, and each rounds differently."""
    layer, shape = INT4[name]
    for seed in range(3):
        node, numbers = node_of(layer(), shape, seed=seed)
        small = numbers.integers(-7, 8, node.weights.q.shape)
        node = with_weights(node, q=18.0 * small, bits=4, divisor=18)
        node = pack_node(node, kernel_family(family))
        assert node.weights.packed
        assert_same(node, random_inputs(node, numbers), family, f"seed {seed}")


def test_weights_of_more_bits_are_not_packed():
    node, _ = node_of(layers.Dense(6), (10,))
    node = with_weights(node, q=np.ones_like(node.weights.q))  # They would fit in 4 bits.
    assert not pack_node(node).weights.packed
    assert pack_node(with_weights(node, bits=4, divisor=1)).weights.packed


def test_weights_beside_16_bits_are_not_packed():
    node, _ = node_of(layers.Dense(6), (10,), bits=16)
    assert not pack_node(with_weights(node, bits=4, divisor=1)).weights.packed
