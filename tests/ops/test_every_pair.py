"""Tests all 65,536 pairs of int8 values of each operator on two tensors, over many scales.

Results must equal the file's. Interpreters compute all pairs at once.
"""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.op import SharedRange
from keras_qat.ops.registry import op_named
from tests.comparison import KERNELS, RUNNABLE
from tests.ops.examples.example import BATCH
from tests.ops.harness import (
    assert_same,
    in_integers,
    in_integers_as_tensors,
    make_node,
    node_of,
    with_ends,
)
from tests.ops.test_contracts import CASES
from tests.ops.test_movement import calls_of

BINARY = [
    case
    for case in CASES
    if case.values[0].quantizes_constants
    and case.values[0].name != "select"
    and case.values[1] == 8
]
COMPARISONS = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")
MEANS = [case for case in CASES if case.values[0].name == "mean" and case.values[1] == 8]
SCALES = {
    "the same": (1.0, 1.0, 1.0),
    "halves": (1.0, 1.0, 2.0),
    "halves of one": (1.0, 0.5, 1.0),
    "next to halves": (1.0, np.nextafter(np.float32(0.5), np.float32(1)), 1.0),
    "thirds": (1.0, 1 / 3, 0.7),
    "a coarse result": (1.0, 0.9, 256.0),
    "next to a coarse result": (1.0, 1.0, np.nextafter(np.float32(128), np.float32(0))),
    "a fine result": (1.0, 0.8, 1 / 90),
    "one far smaller": (1.0, 1 / 2000, 1.0),
    "one far larger": (1 / 700, 1.0, 1 / 3),
    "tiny": (1e-6, 3e-7, 1.3e-6),
    "large": (1e4, 2e4, 1.7e4),
}
"""Scales of both inputs and of the output."""
ZEROS = ((-128, -128, -128), (127, 5, -128), (3, -7, 11))
"""Zero points of the inputs and of the output."""


CODES = np.arange(-128, 128, dtype=np.int8)
COUNT = 2**16 // BATCH + 1
PAIRS = [np.resize(q, (BATCH, COUNT)) for q in (np.repeat(CODES, 256), np.tile(CODES, 256))]


def of_pairs(node: Node) -> dict[str, np.ndarray]:
    return {item.name: q for item, q in zip(node.inputs, PAIRS, strict=True)}


def of_two(op: Any) -> Node:
    """Returns a node of an operator with two tensors as inputs, none of them constant."""
    nodes = (node_of(op, 8, seed)[0] for seed in range(100))
    return next(
        node
        for node in nodes
        if len({*node.inputs}) == 2 and all(isinstance(item, Tensor) for item in node.inputs)
    )


def with_params(node: Node, scales: tuple[Any, ...], zeros: tuple[int, ...]) -> Node:
    """Returns the node on two tensors of all pairs, with these scales and zero points."""
    op, shape = node.op, (None, COUNT)
    assert op is not None
    params: list[Any] = [
        QuantParams(np.float32(scale), zero, 8) for scale, zero in zip(scales, zeros, strict=True)
    ]
    if op.output == SharedRange():
        params = params[:1] * 3
    params[2] = params[2] if node.output.params is not None else None
    return with_ends(node, *params, shapes=[shape] * 3)


@pytest.mark.sample(3)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("op", "bits", "family"), BINARY)
def test_every_pair(op, bits, family, scales):
    node = of_two(op)
    for zeros in ZEROS:
        example = with_params(node, SCALES[scales], zeros)
        inputs = of_pairs(example)
        assert_same(example, inputs, family, f"{scales}, zero points {zeros}")
    traced = tf.function(lambda: in_integers_as_tensors(example, inputs, family), autograph=False)
    for here, there in zip(traced(), in_integers(example, inputs, family), strict=True):
        np.testing.assert_array_equal(here, there)


HALVES = [
    *((name, SCALES["halves"]) for name in ("add", "subtract", "multiply")),
    # XNNPACK supports ratios from 2^-16, for which 255 * 128 is a half. TFLite: 255 * 129.
    *(("multiply", (1.0, 1.0, 2.0 * product)) for product in (255 * 128, 255 * 129)),
    # It supports sums of inputs with scales from 2^-10 to less than 2^8 of the output's.
    *(("add", (0.5, 2.0**-10 * near, 1.0)) for near in (1, 1 - 2.0**-20)),
    *(("subtract", (2.0**-10 * near, 0.5, 1.0)) for near in (1, 1 - 2.0**-20)),
]
"""Operators, with scales for which results are halves."""


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "scales"), HALVES)
def test_results_halfway_between_two_values(name, scales):
    zeros = (-128, -128, 0) if scales[-1] > 2 else ZEROS[-1]
    node = with_params(of_two(op_named(name)), scales, zeros)
    inputs = of_pairs(node)
    for family in RUNNABLE if scales == SCALES["halves"] else KERNELS:
        assert_same(node, inputs, family)


@pytest.mark.slow
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("op", "bits", "family"), MEANS)
def test_every_mean_of_two(op, bits, family, scales):
    (call,) = calls_of(lambda x: tf.reduce_mean(x, -1), (COUNT, 2))
    for zeros in ZEROS:
        node = make_node(call, bits, np.random.default_rng(0))
        before, after = (
            QuantParams(np.float32(SCALES[scales][place]), zeros[place], 8) for place in (0, 2)
        )
        node = with_ends(node, before, after)
        pairs = {node.inputs[0].name: np.stack(PAIRS, -1)}
        assert_same(node, pairs, family, f"{scales}, zeros {zeros}")


@pytest.mark.parametrize(
    ("scales", "zeros", "steps"),
    [
        ((0.02, 0.05, 0.02), (5, -7, 3), 0.54),
        ((3.0, 0.001, 100.0), (0, 127, 0), 0.56),
        ((0.02, 0.05, 0.0002), (-128, -128, -128), 1.34),  # Most quotients are out of range.
    ],
)
def test_quotients_are_near_the_real_ones(scales, zeros, steps):
    node = with_params(of_two(op_named("divide")), scales, zeros)
    inputs = of_pairs(node)
    (quotients,) = in_integers(node, inputs, "xnnpack")
    x, y = (scales[i] * (np.float64(PAIRS[i]) - zeros[i]) for i in range(2))
    y[y == 0] = scales[1]  # Dividing by zero is like dividing by one step.
    real = np.clip(x / y / scales[2] + zeros[2], -128, 127)
    assert np.abs(np.float64(quotients) - real).max() <= steps


@pytest.mark.sample(3)
@pytest.mark.parametrize("ratio", [2.0**6.5, 2.0**7.6, 2.0**14])
@pytest.mark.parametrize("name", ["add", "subtract", "multiply"])
def test_results_in_far_finer_steps_are_the_real_ones(name, ratio):
    """Results differ by at most half a step. Most are outside of the range."""
    before = ratio**0.5 if name == "multiply" else ratio
    for zeros in ZEROS:
        node = with_params(of_two(op_named(name)), (before, before, 1.0), zeros)
        inputs = of_pairs(node)
        x, y = (before * (np.float64(PAIRS[i]) - zeros[i]) for i in range(2))
        real = np.clip(getattr(np, name)(x, y) + zeros[2], -128, 127)
        (codes,) = in_integers(node, inputs, "xnnpack")
        assert np.abs(codes - real).max() <= 0.5


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_are_those_of_the_real_numbers(name):
    """Except values less than 1/128 of the larger scale apart."""
    original = of_two(op_named(name))
    for scales in ((0.1, 0.07), (0.01, 0.3)):
        for zeros in ((-128, -128), (3, -7)):
            node = with_params(original, (*scales, 1.0), (*zeros, 0))
            inputs = of_pairs(node)
            x, y = (scales[i] * (np.float64(PAIRS[i]) - zeros[i]) for i in range(2))
            apart = np.abs(x - y) > max(scales) / 128
            (values,) = in_integers(node, inputs, "xnnpack")
            np.testing.assert_array_equal(values[apart], getattr(np, name)(x, y)[apart])
