"""Scales and zero points of ranges, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from keras_qat.arithmetic.quant_params import QuantParams


@pytest.mark.parametrize(
    ("ends", "bits", "scale", "zero_point"),
    [
        ((0.0, 255.0), 8, 1.0, -128),
        ((-128.0, 127.0), 8, 1.0, 0),
        ((-255.0, 0.0), 8, 1.0, 127),
        ((-50.25, 77.25), 8, 0.5, -28),  # Zero lies between quantized values: nudged down
        ((-50.375, 77.125), 8, 0.5, -27),  # and up.
        ((0.0, 6.0), 8, 6 / 255, -128),
        ((0.0, 15.0), 4, 1.0, -128),
        ((-8.0, 7.0), 4, 1.0, -120),
        ((-15.0, 0.0), 4, 1.0, -113),
        ((-0.8, 6.7), 4, 0.5, -126),
        ((-0.7, 6.8), 4, 0.5, -127),
        ((-1.0, 5.0), 4, 0.4, -126),
        ((-1.0, 2.0), 2, 1.0, -127),
        ((-2.0, 61.0), 6, 1.0, -126),
        ((-32767.5, 32767.5), 16, 1.0, 0),
        ((-3.0, 3.0), 16, 6 / 65535, 0),
        *(((0.0, 0.0), bits, 1.0, zero) for bits, zero in ((2, -128), (8, -128), (16, 0))),
    ],
)
def test_ranges_have_these_scales_and_zero_points(ends, bits, scale, zero_point):
    params = QuantParams.of_range(*ends, bits)
    np.testing.assert_allclose(params.scale, np.float32(scale), rtol=2e-7)
    assert params.zero_point == zero_point
