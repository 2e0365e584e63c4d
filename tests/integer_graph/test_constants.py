"""Constant numbers of a model, and what is known of weights before they are summed."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.integer_graph.resolve_tensors import quantize_constant
from keras_qat.ops.weights import compute_reach


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 3.0), (-3.0, 1.0), (0.5, 2.0), (-2.0, -0.5), (0.0, 0.0)]
)
def test_a_constant_is_kept_to_half_a_step_of_its_own_range(bits, low, high):
    values = np.random.default_rng(0).uniform(low, high, 60).astype(np.float32)
    values[:2] = low, high
    constant = quantize_constant(values, bits)
    low, high = min(low, 0.0), max(high, 0.0)
    step = max(-low, high) / 32767 if bits == 16 else (high - low) / 255
    assert constant.params.scale == np.float32(step or 1 / 32767 if bits == 16 else step or 1.0)
    error = np.abs(constant.params.dequantize(constant.q) - values)
    assert error.max() <= 0.5001 * step


@pytest.mark.parametrize("channels", [(-1,), (-2, -1), (-2,), ()])
@pytest.mark.parametrize("make", [np.asarray, tf.constant])
def test_the_reach_is_the_largest_sum_of_weights_of_one_sign(make, channels):
    for seed in range(3):
        q = np.random.default_rng(seed).integers(-127, 128, (3, 2, 4, 5)).astype(np.float32)
        q *= seed > 0  # Of zeros it is 0.
        axes = tuple(axis for axis in range(-4, 0) if axis not in channels)
        above, below = (np.maximum(sign * q, 0).sum(axes) for sign in (1, -1))
        assert float(compute_reach(make(q), channels)) == max(above.max(), below.max())
