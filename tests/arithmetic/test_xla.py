"""Tests that fake quantization returns the same values with XLA, even near ties."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic import fake_quant, plain_operations
from tests.helpers import assert_all_equal, rng

RANGES = [(0.0, 6.0), (-1.237, 3.71), (0.0, 2.9e-3), (-811.5, 33.2), (-0.3, 0.0), (-6.0, 6.0)]


def near_ties(low, high, bits, seed=0):
    """Returns values next to the middle of two levels, and some outside of the range."""
    numbers, steps = rng(seed), 2**bits - 1
    middles = low + (high - low) / steps * (numbers.integers(-3, steps + 3, 3000) + 0.5)
    return (middles * (1.0 + numbers.integers(-3, 4, 3000) * 2.0**-24)).astype(np.float32)


def compiled(function):
    return tf.function(function, jit_compile=True, autograph=False)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_activations(bits):
    @compiled
    def under_xla(x, low, high):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fake_quant.fake_quantize_if(True, x, low, high, bits)
        return y, tape.gradient(y, x)

    for low, high in RANGES:
        x = tf.constant(near_ties(low, high, bits))
        ends = tf.constant(low), tf.constant(high)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fake_quant.fake_quantize_if(True, x, *ends, bits)
        expected = y, tape.gradient(y, x)
        assert_all_equal(under_xla(x, *ends), expected)


def test_a_sum_behind_activations_rounds_once():
    """XLA fuses a sum with the quantizer's last product, which changes the sum's last bit."""
    ends = map(tf.constant, RANGES[1])
    x, z = tf.constant(near_ties(*RANGES[1], 8)), tf.constant(near_ties(0.0, 1.0, 8, seed=1))

    def add(x, z, low, high):
        return fake_quant.fake_quantize(x, low, high) + z

    arguments = x, z, *ends
    given, expected = compiled(add)(*arguments).numpy(), add(*arguments).numpy()
    assert np.all(np.abs(given - expected) <= np.spacing(np.abs(expected).max()))


@pytest.mark.sample(3)
@pytest.mark.parametrize("axes", [(-1,), ()])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_weights(bits, axes):
    limits = np.array([0.02, 1.0, 3.7, 100.0, 0.37], np.float32)
    columns = [near_ties(-limit, limit, bits, seed) for seed, limit in enumerate(limits)]
    weights = np.clip(np.stack(columns, -1), -limits, limits)[:, : None if axes else 1]

    def quantize(weights):
        limits = fake_quant.channel_limits(weights, axes)
        codes = fake_quant.quantize_channels(weights, limits, bits)
        return codes, fake_quant.fake_quantize_channels(weights, limits, bits)

    assert_all_equal(compiled(quantize)(weights), quantize(weights))


def test_averages():
    low, high = map(tf.constant, RANGES[1])
    x = tf.constant(near_ties(*RANGES[1], 8))

    def quantize(x):
        return fake_quant.fake_quantize_average(x, low, high)

    np.testing.assert_array_equal(compiled(quantize)(x), quantize(x))


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("is_known", [False, True])
def test_single_operations_equal_tensorflows(bits, is_known, monkeypatch):
    """Tests the operations for GPUs with zero points of all kinds."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["a GPU"])
    assert plain_operations.must_not_fuse()
    levels = 2**bits - 1
    one_step = [(-scale, scale * (levels - 1)) for scale in (0.3, 1.0, 7.77)]
    ranges = [*RANGES, *one_step, (-1.5, 3.0), (-1.0, levels - 0.5)]
    known = [(float(np.float32(low)), float(np.float32(high))) for low, high in ranges]
    narrow_ranges = [False] if is_known else [False, True]

    def quantize(x, ends):
        return [
            fake_quant.fake_quantize(x, *(own if is_known else ends[index]), bits, narrow_range)
            for index, own in enumerate(known)
            for narrow_range in narrow_ranges
        ]

    traced = tf.function(quantize, autograph=False)
    x = tf.constant(np.concatenate([near_ties(*ends, bits)[:800] for ends in ranges]))
    ends = [tuple(map(tf.constant, own)) for own in known]
    results = iter(traced(x, ends))
    for own in ends:
        for narrow_range in narrow_ranges:
            expected = tf.quantization.fake_quant_with_min_max_vars(x, *own, bits, narrow_range)
            np.testing.assert_array_equal(next(results), expected)
    names = {op.type for op in traced.get_concrete_function(x, ends).graph.get_operations()}
    assert not names & {"FakeQuantWithMinMaxVars", "QuantizeAndDequantizeV4"}


def test_ranges_that_begin_at_zero_take_three_operations(monkeypatch):
    """Two more operations compute the mask of the gradient."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["a GPU"])
    for bits in (2, 4, 8, 16):
        x, high = tf.constant(near_ties(0.0, 1.37, bits)), tf.constant(1.37)
        traced = tf.function(partial(fake_quant.fake_quantize, bits=bits), autograph=False)
        plain = traced.get_concrete_function(x, 0.0, high)
        expected = tf.quantization.fake_quant_with_min_max_vars(x, 0.0, high, bits)
        np.testing.assert_array_equal(plain(x, high), expected)
        operations = [op for op in plain.graph.get_operations() if op.outputs]
        on_x = [op.type for op in operations if op.outputs[0].shape.rank]
        kinds = [kind for kind in on_x if kind not in ("Placeholder", "Identity", "IdentityN")]
        assert kinds[:3] == ["RealDiv", "FakeQuantWithMinMaxArgs", "Mul"]
        assert kinds[3:] == ["SquaredDifference", "Less"]


def test_quotients():
    """A GPU's float32 division is wrong in the last bit with XLA, unlike float64."""
    numbers = rng(5)
    x, y = (numbers.uniform(1.0, 2.0, 100_000).astype(np.float32) for _ in range(2))
    divide = compiled(plain_operations.quotient)
    np.testing.assert_array_equal(divide(x, y), x / y)
    np.testing.assert_array_equal(divide(x, 255.0), x / np.float32(255.0))
    np.testing.assert_array_equal(divide(tf.constant([1.0, np.inf]), tf.zeros([2])), [0.0, 0.0])
    graph = divide.get_concrete_function(x, y).graph
    assert {op.inputs[0].dtype for op in graph.get_operations() if "Div" in op.type} == {tf.float64}
    x, y = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_array_equal(divide(x, y), x / y)
