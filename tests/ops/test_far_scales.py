"""Tests scales with a large ratio, for which kernels overflow, refuse a file or crash."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph.fold_weights import LARGEST_MULTIPLIER
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.registry import op_named
from keras_qat.ops.requantize import REQUANTIZE
from tests.comparison import KERNELS
from tests.ops.harness import BATCH, assert_same, in_integers, node_of, random_inputs, with_ends
from tests.ops.test_every_code import with_scales

OPS = (
    *("conv", "depthwise_conv", "transpose_conv", "dense", "affine", "add", "subtract", "multiply"),
    *("matmul", "mean", "relu", "leaky_relu", "prelu", "hard_swish", "softmax"),
    *("sigmoid", "tanh"),
)


def finer(tensor: Any, factor: float) -> Any:
    """Returns a quantized tensor with its scale multiplied by a factor."""
    if tensor.params is None:
        return tensor
    scale = np.float32(tensor.params.scale * factor)
    return dataclasses.replace(tensor, params=dataclasses.replace(tensor.params, scale=scale))


def with_far_scales(node: Node, numbers: np.random.Generator) -> Node:
    """Returns a node with a far smaller output scale, and folded weights.

    For operators with a fixed output scale, the input's scale is changed: smaller, or far larger.
    """
    factor = float(10.0 ** -numbers.integers(2, 7))
    assert node.op is not None
    of_input = {"softmax": 1e-4 * factor, "sigmoid": 1 / factor, "tanh": 1 / factor}
    if node.op.name in of_input:
        tensors = {tensor: finer(tensor, of_input[node.op.name]) for tensor in node.inputs}
        return dataclasses.replace(node, inputs=tuple(tensors[tensor] for tensor in node.inputs))
    node = dataclasses.replace(node, outputs=(finer(node.output, factor),))
    if node.weights is None or not node.op.is_weighted:
        return node
    ends = node.inputs[0].params, node.output.params
    largest = LARGEST_MULTIPLIER[16 if ends[0].bits == 16 else 8]
    limit = np.float64(np.float32(largest * np.float64(ends[1].scale) / np.float64(ends[0].scale)))
    scale = np.minimum(node.weights.scale, limit)
    return dataclasses.replace(node, weights=dataclasses.replace(node.weights, scale=scale))


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", [*KERNELS, "tflm"])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", OPS)
def test_results_are_those_of_the_interpreter(name, bits, family):
    op = op_named(name)
    if not op.has_kernel_for(bits):
        pytest.skip("no such kernel")
    for seed in range(4):
        node, numbers = node_of(op, bits, seed)
        node = with_far_scales(node, numbers)
        assert all(isinstance(tensor, Tensor) or tensor.params for tensor in node.inputs)
        assert_same(node, random_inputs(node, numbers), family, f"seed {seed}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("maximum", [None, 6.0])
@pytest.mark.parametrize("bits", [5, 8])
@pytest.mark.parametrize("name", ["add", "subtract", "multiply"])
def test_results_far_beyond_the_range(name, bits, maximum):
    """Kernels overflow, or a ReLU6 inside the range has few steps in a larger scale."""
    for seed in range(3):
        node, numbers = node_of(op_named(name), bits, seed)
        params = QuantParams(np.float32(12 / 2**bits), 2**bits // 3 - 128, bits)
        output = dataclasses.replace(node.output, params=params)
        for ratio in (2.0**7.6, 2.0**8.1, 2.0**14):
            scale = float(params.scale) * ratio
            factors = [scale**0.5] * 2 if name == "multiply" else [scale] * 2
            inputs = [
                finer(item, factor / item.params.scale)
                for item, factor in zip(node.inputs, factors, strict=True)
            ]
            far = dataclasses.replace(
                node, inputs=tuple(inputs), outputs=(output,), maximum=maximum
            )
            for family in [*KERNELS, "tflm"]:
                assert_same(far, random_inputs(far, numbers), family, f"seed {seed}, {ratio}")


def test_sums_are_computed_in_no_wider_steps_than_kernels_need():
    """One input is zero, the other has the output's scale. A scale of 2^2.6 times is enough."""
    node, numbers = node_of(op_named("add"), 8, 2)
    ends = [QuantParams(np.float32(scale), 0) for scale in (2.0**7.6, 1.0, 1.0)]
    *tensors, output = (
        dataclasses.replace(node.output, name=name, params=params)
        for name, params in zip("abc", ends, strict=True)
    )
    node = dataclasses.replace(node, inputs=tuple(tensors), outputs=(output,))
    given = random_inputs(node, numbers)
    given["a"][...] = 0
    (codes,) = in_integers(node, given, "xnnpack")
    steps = np.abs(codes.astype(int) - given["b"])
    assert 1 < steps.max() <= 2.0**2.6 / 2 + 1


@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("scale", [1e7, 1e8, 1e12])
def test_hard_swish_of_a_diverged_network(scale, family):
    """The kernel shifts by too many bits for scales from 1e8, so files hold a table instead."""
    node, numbers = node_of(op_named("hard_swish"), 8, 1)
    ends = [finer(item, scale / item.params.scale) for item in (node.inputs[0], node.output)]
    node = dataclasses.replace(node, inputs=(ends[0],), outputs=(ends[1],))
    assert_same(node, random_inputs(node, numbers), family)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
@pytest.mark.parametrize("scale", [1.9, 2.0, 3.9, 4.0, 5.0, 7.9, 8.0, 30.0, 1e4])
def test_wide_steps_in_tflite_micro(name, scale):
    """TFLite Micro returned the lower end for 0, and was believed to return the middle."""
    node, (inputs, _) = with_scales(node_of(op_named(name), 8, 1)[0], 8, scale, 0.5, 1.0)
    assert_same(node, inputs, "tflm")


@functools.cache
def relu_node() -> Node:
    return node_of(op_named("relu"), 8, 1)[0]


def assert_requantizes(ratio: float, zero_point: int, family: str) -> None:
    """Asserts that all values in a scale with this ratio equal the interpreter's."""
    source = relu_node()
    x = dataclasses.replace(source.inputs[0], shape=(None, 128 + 5))
    every = np.resize(np.arange(-128, 128), (BATCH, 128 + 5)).astype(np.int8)
    ends = QuantParams(np.float32(0.01), zero_point), QuantParams(np.float32(0.01 / ratio), 3)
    tensors = [dataclasses.replace(x, name=f"end_{i}", params=p) for i, p in enumerate(ends)]
    node = Node("requantize", REQUANTIZE, {}, source.call, (tensors[0],), (tensors[1],))
    assert_same(node, {"end_0": every}, family, f"ratio {ratio}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", [*KERNELS, "tflm"])
@pytest.mark.parametrize("exponent", [-10, -9, -8.5, -8, -7.5, 6.5, 7, 8])
def test_far_wider_scales_round_the_same_at_each_position(exponent, family):
    """TFLite's vectorized QUANTIZE rounds halves differently from the last elements."""
    for step in range(12):
        for zero_point in (-128, 5, 127):
            assert_requantizes(2.0 ** (exponent + step / 24), zero_point, family)


@pytest.mark.parametrize("family", KERNELS)
def test_ratios_that_are_a_half_in_256ths(family):
    """XNNPACK rounds them up, because it computes in 256ths. Other kernels compute them exactly."""
    for whole in (1, 20, 120, 130):
        assert_requantizes(whole + 0.4985, 5, family)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize(("name", "bits"), [("add", 8), ("add", 16), ("subtract", 16)])
def test_sums_at_the_ends_of_what_kernels_take(name, bits, family):
    """Near 2^5, 2^7 and 2^13 output steps per input step, kernels need a larger output scale."""
    node, numbers = node_of(op_named(name), bits, 1)
    widest = max(float(item.params.scale) for item in node.inputs)
    for exponent in (-9.5, 4.9, 5.1, 6.9, 7.1) if bits == 8 else (-9.5, 6.0, 12.9, 13.1, 14.5):
        factor = widest / 2.0**exponent / float(node.output.params.scale)
        example = dataclasses.replace(node, outputs=(finer(node.output, factor),))
        assert_same(example, random_inputs(node, numbers), family, f"2^{exponent}")


def test_slopes_that_xnnpack_leaves_to_tflite():
    """Slopes above 128, for which halves of its 256ths would be rounded up."""
    node, _ = node_of(op_named("leaky_relu"), 8, 1)
    shape, scale = (None, 5), node.inputs[0].params.scale
    for slope, zero_point in [(150.5, 127), (-150.5, -128), (128.5, 127)]:
        ends = [QuantParams(scale, zero, 8) for zero in (0, zero_point)]
        attributes = {**node.attributes, "slope": slope}
        example = with_ends(node, *ends, shapes=[shape] * 2, attributes=attributes)
        q = np.arange(-2, 3).astype(np.int8)[None].repeat(BATCH, 0)
        assert_same(example, {node.inputs[0].name: q}, "xnnpack", f"slope {slope}")


@pytest.mark.parametrize(
    ("ratio", "slope"),
    [
        *((0.0035, 2.0), (0.0045, 2.0), (120.4985, 0.1), (150.4985, 0.1)),
        *((0.5, 0.007), (1.0, -127.4985)),
    ],
)
def test_leaky_relus_at_the_ends_of_what_xnnpack_takes(ratio, slope):
    """From 2^-8 to 2^7, it multiplies by 256ths above and below zero."""
    node, _ = node_of(op_named("leaky_relu"), 8, 1)
    every = np.arange(-128, 128).astype(np.int8)[None].repeat(BATCH, 0)
    for zeros in ((0, -128), (0, 127), (-128, -10), (127, 10)):
        scales = np.float32([0.1, 0.1 / ratio])
        ends = [QuantParams(*row, 8) for row in zip(scales, zeros, strict=True)]
        attributes = {**node.attributes, "slope": slope}
        example = with_ends(node, *ends, shapes=[(None, 256)] * 2, attributes=attributes)
        assert_same(example, {node.inputs[0].name: every}, "xnnpack", f"zero points {zeros}")


@pytest.mark.parametrize("shapes", [((7, 5), (7, 5)), ((7, 5), (1, 5))])
def test_the_last_values_of_sums_of_16_bits(shapes):
    """For equal shapes, TFLite rounds blocks of 16 values once, and the remaining values twice."""
    node, _ = node_of(op_named("add"), 16, 0)
    node = with_ends(node, shapes=[(None, *shape) for shape in (*shapes, shapes[0])])
    tensors, unlike = (*node.inputs, node.output), 0
    for seed in range(12):
        numbers = np.random.default_rng(seed)
        # An input step is 2^11 output steps, so the last bits of sums matter.
        scales = 1.0, numbers.uniform(0.1, 1.0), 2.0**-11
        ends = [finer(x, s / x.params.scale) for x, s in zip(tensors, scales, strict=True)]
        example = dataclasses.replace(node, inputs=tuple(ends[:2]), outputs=(ends[2],))
        q = {
            item.name: numbers.integers(-8, 8, (BATCH, *item.shape[1:])).astype(np.int16)
            for item in example.inputs
        }
        once, twice = (in_integers(example, q, family)[0] for family in ("xnnpack", "reference"))
        if index := next(zip(*np.nonzero(once != twice), strict=True), None):
            q = {name: np.full_like(values, values[index]) for name, values in q.items()}
            unlike += 1
        assert_same(example, q, "xnnpack", f"seed {seed}")
    assert bool(unlike) == (shapes[0] == shapes[1])


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_integers_of_all_sizes(dtype, bits, family):
    """Values outside of the range are clipped before they overflow, also at the ends of 32 bits."""
    nodes = (node_of(op_named("from_integers"), bits, seed)[0] for seed in range(99))
    node = next(node for node in nodes if node.inputs[0].dtype == dtype)
    ends = 2 ** np.arange(32)[:, None] + [-1, 0, 1]
    limits = np.iinfo("int32" if dtype == "int64" else dtype)
    every = np.unique(np.clip([ends, -ends], limits.min, limits.max)).astype(dtype)
    x = dataclasses.replace(node.inputs[0], shape=(None, every.size))
    # With the last scale, 2^31 - 128 is rounded down and 2^31 - 1 is rounded up.
    for scale in (0.01, 0.7, 3.0, 2.0**15, 2.0**23, 2.0**25, 104755296.0):
        params = QuantParams(np.float32(scale), 0 if bits == 16 else -7, bits)
        output = dataclasses.replace(node.output, shape=x.shape, params=params)
        example = dataclasses.replace(node, inputs=(x,), outputs=(output,))
        assert_same(example, {x.name: every[None].repeat(BATCH, 0)}, family, f"scale {scale}")
