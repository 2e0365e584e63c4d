"""Which numbers pass the gradient of a quantizer, by both ways to find the ends of its range."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic import gradient_masks
from tests.helpers import rng

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
def test_within_range_passes_what_the_mask_of_the_range_does(name, bits, narrow_range):
    low, high = (tf.constant(end) for end in RANGES[name])
    ends = np.float32([low, high, *gradient_masks.find_range_ends(low, high, bits, narrow_range)])
    beside = [np.nextafter(ends, np.float32(side)) for side in (-np.inf, np.inf)]
    x = np.concatenate([ends, *beside, rng(1).normal(size=64) * 4]).astype(np.float32)
    upstream = np.linspace(1.0, 2.0, x.size, dtype=np.float32)
    mask = gradient_masks.mask_of_range(low, high, bits, narrow_range, gradient_masks.Gates())
    passed = gradient_masks.zero_outside_range(upstream, x, low, high, bits, narrow_range)
    np.testing.assert_array_equal(passed, mask(upstream, x))
    assert 0 < np.count_nonzero(passed) < x.size
