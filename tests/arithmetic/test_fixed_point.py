"""Tests fixed-point multipliers and shifts in TensorFlow against fractions."""

from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic import fixed_point

NUMBERS = 10.0 ** np.random.default_rng(0).uniform(-6, 0, 2_000)


def rounded(x: Fraction) -> int:
    """Rounds to the nearest integer, halves away from zero."""
    return int(x + Fraction(1, 2)) if x >= 0 else -int(-x + Fraction(1, 2))


@pytest.mark.parametrize("number", [1e-6, 0.0123, 0.25, 0.9999999999, 1.0, 3.7, 100.0])
def test_products_are_rounded_twice(number):
    """First to 31 fractional bits, halves up, and then by the shift, halves away from zero."""
    computed = fixed_point.to_fixed_point(tf.constant(number, tf.float64))
    multiplier, exponent = (int(item) for item in computed)
    assert 2**30 <= multiplier < 2**31
    assert multiplier * 2.0 ** (exponent - 31) == pytest.approx(number, rel=2**-30)
    x = np.random.default_rng(1).integers(-(2**17), 2**17, 200)
    expected = []
    for row in x:
        product = Fraction(int(row) << max(exponent, 0)) * multiplier / 2**31
        high = int((product + Fraction(1, 2)).__floor__())
        expected.append(rounded(Fraction(high, 2 ** max(-exponent, 0))))
    np.testing.assert_array_equal(fixed_point.multiply(tf.constant(x), computed), expected)


@pytest.mark.parametrize("exponent", [-31, -12, -3, -1, 0, 1, 9])
def test_float64_multiplies_like_integers(exponent):
    """Some products are halves in the first or in the second rounding."""
    draw = np.random.default_rng(2)
    multipliers = np.r_[2**30, 2**31 - 1, 3 * 2**29, draw.integers(2**30, 2**31, 60)]
    factor = tf.constant(multipliers), tf.fill(multipliers.shape, tf.constant(exponent, tf.int64))
    near_halves = (np.arange(1, 2**10)[:, None] << np.arange(12)).ravel()
    x = np.r_[0, near_halves, draw.integers(0, 2**22, 5_000), 2**22 - 1]
    x = tf.constant(np.r_[x, -x][:, None])
    in_float = fixed_point.multiply_floats(tf.cast(x, tf.float64), fixed_point.to_floats(factor))
    np.testing.assert_array_equal(in_float, fixed_point.multiply(x, factor))


@pytest.mark.parametrize("bits", [0, 1, 15, 22, 30])
def test_float64_divides_like_integers(bits):
    quotients = np.random.default_rng(3).integers(0, 2 ** (38 - bits), 1_000)
    halves = (quotients << bits) + (1 << bits >> 1)
    x = tf.constant(np.concatenate([sign * halves + off for sign in (1, -1) for off in (-1, 0, 1)]))
    expected = fixed_point.divide(x, tf.constant(bits, tf.int64))
    computed = fixed_point.divide_floats(tf.cast(x, tf.float64), bits)
    np.testing.assert_array_equal(computed, expected)


def in_32_bits(number):
    """Returns the lower 32 bits, like a kernel with a 32-bit result."""
    return (number + 2**31) % 2**32 - 2**31


def test_sums_of_48_bits_are_rounded_once():
    x = np.random.default_rng(1).integers(-(2**40), 2**40, NUMBERS.size)
    number = fixed_point.to_fixed_point(tf.constant(NUMBERS))
    multipliers, exponents = (np.asarray(part) for part in number)
    expected = []
    for row, multiplier, exponent in zip(x, multipliers, exponents, strict=True):
        reduced = min((int(multiplier) + 2**15) >> 16, 2**15 - 1)
        half = 1 << (14 - int(exponent))
        expected.append(in_32_bits((int(row) * reduced + half) >> (15 - int(exponent))))
    np.testing.assert_array_equal(fixed_point.multiply_sums(tf.constant(x), number), expected)


def test_numbers_at_the_ends():
    numbers = np.array([1.0, 2.0**-31, 2.0**-40, 1 - 2.0**-40, 0.75])
    multiplier, exponent = fixed_point.to_fixed_point(numbers)
    assert list(np.asarray(multiplier)) == [2**30, 2**30, 0, 2**30, 3 * 2**29]
    assert list(np.asarray(exponent)[[0, 1, 3, 4]]) == [1, -30, 1, 0]


def test_exact_multipliers_survive_float32():
    """Files store float32 scales, so a multiplier must stay exact after that rounding."""
    powers = 2.0 ** -np.arange(1, 20)
    numbers = np.concatenate([NUMBERS, powers, powers * (1 - 1e-6), powers * (1 + 1e-6)])
    exact = fixed_point.exact_multiplier(tf.constant(numbers)).numpy()
    assert np.abs(exact / numbers - 1).max() < 6.2e-5
    for off in (-1e-7, 0, 1e-7):
        multiplier, exponent = (
            np.asarray(item) for item in fixed_point.to_fixed_point(exact * (1 + off))
        )
        taken = np.minimum((multiplier + 2**15) >> 16, 2**15 - 1) / 2.0**15
        np.testing.assert_array_equal(taken * 2.0**exponent, exact)


def test_division_by_a_power_of_two():
    x = np.arange(-12, 13)
    for exponent in range(4):
        expected = [rounded(Fraction(int(row), 2**exponent)) for row in x]
        computed = fixed_point.divide(tf.constant(x), tf.constant(exponent, tf.int64))
        np.testing.assert_array_equal(computed, expected)
