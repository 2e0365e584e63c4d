"""Multipliers and shifts in TensorFlow against plain numpy."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fixed_point
from keras_qat.simulate import arithmetic

NUMBERS = 10.0 ** np.random.default_rng(0).uniform(-6, 0, 2_000)


def test_the_same_as_in_numpy():
    for found, expected in zip(
        fixed_point.fixed_point(NUMBERS), arithmetic.fixed_point(NUMBERS), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    x = np.random.default_rng(1).integers(-(2**30), 2**30, NUMBERS.size)
    number = fixed_point.fixed_point(NUMBERS)
    for name in ("multiply", "multiply_sums"):
        np.testing.assert_array_equal(
            getattr(fixed_point, name)(tf.constant(x), number),
            getattr(arithmetic, name)(x, *arithmetic.fixed_point(NUMBERS)),
        )


def test_numbers_at_the_ends():
    numbers = np.array([1.0, 2.0**-31, 2.0**-40, 1 - 2.0**-40, 0.75])
    multiplier, exponent = fixed_point.fixed_point(numbers)
    assert list(np.asarray(multiplier)) == [2**30, 2**30, 0, 2**30, 3 * 2**29]
    assert list(np.asarray(exponent)[[0, 1, 3, 4]]) == [1, -30, 1, 0]


def test_exact_multipliers_survive_float32():
    """They are what kernels take of them, also next to where a scale's rounding moves them."""
    powers = 2.0 ** -np.arange(1, 20)
    numbers = np.concatenate([NUMBERS, powers, powers * (1 - 1e-6), powers * (1 + 1e-6)])
    exact = fixed_point.exact_multiplier(tf.constant(numbers)).numpy()
    assert np.abs(exact / numbers - 1).max() < 6.2e-5
    for off in (-1e-7, 0, 1e-7):
        multiplier, exponent = (
            np.asarray(each) for each in fixed_point.fixed_point(exact * (1 + off))
        )
        taken = np.minimum((multiplier + 2**15) >> 16, 2**15 - 1) / 2.0**15
        np.testing.assert_array_equal(taken * 2.0**exponent, exact)
