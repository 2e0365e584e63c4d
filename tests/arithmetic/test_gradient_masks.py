"""Which numbers pass the gradient of a quantizer."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic.gradient_masks import zero_outside_range
from keras_qat.arithmetic.plain_operations import BEYOND, nudged_range
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
