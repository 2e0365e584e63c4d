"""Fake quantization that XLA compiles gives the same values, also between two levels."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic import as_written, fake_quant
from tests.helpers import rng

RANGES = [(0.0, 6.0), (-1.237, 3.71), (0.0, 2.9e-3), (-811.5, 33.2), (-0.3, 0.0), (-6.0, 6.0)]


def near_ties(low, high, bits, seed=0):
    """Numbers some last bits beside the middle of two levels, and a few outside of the range."""
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
        for given, wanted in zip(under_xla(x, *ends), expected, strict=True):
            np.testing.assert_array_equal(given, wanted)


def test_a_sum_behind_activations_rounds_once():
    """XLA joins it with the last product of the quantizer: a last bit of the sum."""
    ends = map(tf.constant, RANGES[1])
    x, z = tf.constant(near_ties(*RANGES[1], 8)), tf.constant(near_ties(0.0, 1.0, 8, seed=1))

    def add(x, z, low, high):
        return fake_quant.fake_quantize(x, low, high) + z

    arguments = x, z, *ends
    given, expected = compiled(add)(*arguments).numpy(), add(*arguments).numpy()
    assert np.all(np.abs(given - expected) <= np.spacing(np.abs(expected).max()))


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

    for given, wanted in zip(compiled(quantize)(weights), quantize(weights), strict=True):
        np.testing.assert_array_equal(given, wanted)


def test_averages():
    low, high = map(tf.constant, RANGES[1])
    x = tf.constant(near_ties(*RANGES[1], 8))

    def quantize(x):
        return fake_quant.fake_quantize_average(x, low, high)

    np.testing.assert_array_equal(compiled(quantize)(x), quantize(x))


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_single_operations_equal_tensorflows(low, high, bits, monkeypatch):
    """As they are used where there is a GPU."""
    x, ends = tf.constant(near_ties(low, high, bits)), (tf.constant(low), tf.constant(high))
    expected = fake_quant.fake_quantize(x, *ends, bits)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["a GPU"])
    assert as_written.must_not_fuse()
    plain = tf.function(lambda x: fake_quant.fake_quantize(x, *ends, bits), autograph=False)
    np.testing.assert_array_equal(plain(x), expected)
    names = {op.type for op in plain.get_concrete_function(x).graph.get_operations()}
    assert not any(name.startswith("FakeQuant") for name in names)
