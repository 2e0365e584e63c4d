"""Scales and zero points of ranges, worked out by hand."""

import numpy as np
import pytest

from keras_qat.arithmetic.fake_quant import fake_quantize
from keras_qat.arithmetic.quant_params import QuantParams


@pytest.mark.parametrize(
    ("ends", "bits", "scale", "zero_point"),
    [
        ((0.0, 255.0), 8, 1.0, -128),
        ((-128.0, 127.0), 8, 1.0, 0),
        ((-255.0, 0.0), 8, 1.0, 127),
        ((-50.125, 77.375), 8, 0.5, -28),  # Zero lies between quantized values: nudged down
        ((-50.375, 77.125), 8, 0.5, -27),  # and up,
        ((-50.25, 77.25), 8, 0.5, -27),  # and halfway, as in training, up.
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
    """Zero lies halfway between two levels of a symmetric range, where sines and signs end."""
    numbers = np.random.default_rng(0)
    for high in [1.0, 0.5, np.pi, *numbers.uniform(0.01, 100, 20)]:
        low = -np.float32(high) * (numbers.uniform() if high > 50 else 1)
        params = QuantParams.from_range(low, high, bits)
        levels = params.dequantize(np.arange(params.lowest, params.highest + 1))
        trained = fake_quantize(levels, low, high, bits)
        np.testing.assert_allclose(trained, levels, atol=1e-3 * params.scale)
