"""Tests scales and zero points of ranges against manual results, and gradients of ranges."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic.fake_quant import fake_quantize
from keras_qat.arithmetic.gradient_masks import zero_outside_range
from keras_qat.arithmetic.plain_operations import BEYOND, nudged_range
from keras_qat.arithmetic.quant_params import QuantParams
from tests.helpers import rng


@pytest.mark.parametrize(
    ("ends", "bits", "scale", "zero_point"),
    [
        ((0.0, 255.0), 8, 1.0, -128),
        ((-128.0, 127.0), 8, 1.0, 0),
        ((-255.0, 0.0), 8, 1.0, 127),
        ((-50.125, 77.375), 8, 0.5, -28),  # Zero lies between quantized values and is nudged down,
        ((-50.375, 77.125), 8, 0.5, -27),  # up,
        ((-50.25, 77.25), 8, 0.5, -27),  # and from halfway up, as in training.
        ((0.0, 6.0), 8, 6 / 255, -128),
        ((0.0, 15.0), 4, 1.0, -128),
        ((-8.0, 7.0), 4, 1.0, -120),
        ((-15.0, 0.0), 4, 1.0, -113),
        ((-0.8, 6.7), 4, 0.5, -126),
        ((-0.7, 6.8), 4, 0.5, -127),
        ((-1.0, 5.0), 4, 0.4, -125),
        ((-1.0, 2.0), 2, 1.0, -127),
        ((-2.0, 61.0), 6, 1.0, -126),
        ((-32767.5, 32767.5), 16, 1.0, 0),
        ((-3.0, 3.0), 16, 6 / 65535, 0),
        *(((0.0, 0.0), bits, 1.0, zero) for bits, zero in ((2, -128), (8, -128), (16, 0))),
    ],
)
def test_ranges_have_these_scales_and_zero_points(ends, bits, scale, zero_point):
    params = QuantParams.from_range(*ends, bits)
    np.testing.assert_allclose(params.scale, np.float32(scale), rtol=2e-7)
    assert params.zero_point == zero_point


@pytest.mark.parametrize("bits", [2, 4, 7, 8])
def test_codes_stand_for_the_levels_of_training(bits):
    """Zero is halfway between two levels of a symmetric range, such as the range of sines."""
    numbers = np.random.default_rng(0)
    for high in [1.0, 0.5, np.pi, *numbers.uniform(0.01, 100, 20)]:
        low = -np.float32(high) * (numbers.uniform() if high > 50 else 1)
        params = QuantParams.from_range(low, high, bits)
        levels = params.dequantize(np.arange(params.lowest, params.highest + 1))
        trained = fake_quantize(levels, low, high, bits)
        np.testing.assert_allclose(trained, levels, atol=1e-3 * params.scale)


RANGES = {
    "both signs": (-0.3, 5.7),
    "symmetric": (-1.0, 1.0),
    "positive": (0.0, 3.3),
    "negative": (-0.7, 0.0),
    "narrow": (-1e-30, 3e-30),
    "zeros": (0.0, 0.0),
}


@pytest.mark.parametrize("narrow_range", [False, True])
@pytest.mark.parametrize("bits", [2, 8, 16])
@pytest.mark.parametrize("name", RANGES)
def test_a_gradient_passes_inside_of_the_nudged_range(name, bits, narrow_range):
    low, high = (tf.constant(end) for end in RANGES[name])
    lowest, highest = (end * BEYOND for end in nudged_range(low, high, bits, narrow_range))
    ends = np.float32([low, high, lowest, highest])
    beside = [np.nextafter(ends, np.float32(side)) for side in (-np.inf, np.inf)]
    x = np.concatenate([ends, *beside, rng(1).normal(size=64) * 4]).astype(np.float32)
    upstream = tf.linspace(1.0, 2.0, x.size)
    passed = zero_outside_range(upstream, tf.constant(x), low, high, bits, narrow_range)
    np.testing.assert_array_equal(passed, np.where((x >= lowest) & (x <= highest), upstream, 0))
    assert 0 < np.count_nonzero(passed) < x.size
    for on, expected in ((True, passed), (False, upstream)):
        switched = zero_outside_range(
            upstream, tf.constant(x), low, high, bits, narrow_range, tf.constant(on)
        )
        np.testing.assert_array_equal(switched, expected)
