"""Tests 16-bit scales that are powers of two or close: TFLite has special kernels for them."""

import dataclasses

import numpy as np
import pytest

from keras_qat.ops.registry import op_named
from tests.comparison import RUNNABLE
from tests.ops.harness import BATCH, assert_same, node_of, with_ends

pytestmark = pytest.mark.parametrize("family", RUNNABLE)


def assert_exact_with(name, scale, family):
    node, _ = node_of(op_named(name), 16, 0)
    (x,), shape = node.inputs, (None, 2**16 // BATCH + 1)
    params = dataclasses.replace(x.params, scale=np.float32(scale))
    node = with_ends(node, params, node.output.params, shapes=[shape] * 2)
    every = np.arange(BATCH * shape[1]).astype(np.int16)  # Past one end, and from the other.
    assert_same(node, {x.name: every.reshape(BATCH, -1)}, family, f"scale {scale!r}")


@pytest.mark.sample(6)
@pytest.mark.parametrize("off", [0.0, 1e-4, -1e-4, 6e-4, -6e-4, 1e-3, -1e-3])
@pytest.mark.parametrize("exponent", [-16, -13, -12, -11, -10, -3])
@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_near_a_power_of_two(name, exponent, off, family):
    assert_exact_with(name, 2.0**exponent * (1 + off), family)


@pytest.mark.sample(1)
@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("exponent", [-12, -11])
def test_where_what_counts_as_a_power_ends(exponent, side, family):
    """The limit is 0.001 in the logarithm in float32, which some neighbours share."""
    end = np.float32(2.0 ** (exponent + 0.001 * side))
    for steps in range(-24, 25, 4):
        scale = (end.view(np.int32) + np.int32(steps)).view(np.float32)
        assert_exact_with("tanh", scale, family)


@pytest.mark.sample(6)
@pytest.mark.parametrize("steps", [1, 128])
@pytest.mark.parametrize(("name", "distance"), [("sigmoid", 1 / 24), ("tanh", 1 / 48)])
def test_on_and_between_all_points_of_the_table(name, distance, steps, family):
    assert_exact_with(name, distance / steps, family)
