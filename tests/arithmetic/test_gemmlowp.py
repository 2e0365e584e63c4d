"""Tests that functions in fixed point equal gemmlowp's and TFLite's for all inputs.

The expected values are computed by a copy of gemmlowp's `fixedpoint.h` and TFLite's `common.h`, for
integers of `n` bits and a sign: 31 bits for softmax, 15 for the gates of LSTMs.
"""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic.fixed_point import (
    exponential,
    inverse_square_root,
    reciprocal,
    saturate,
    shift,
)
from keras_qat.arithmetic.sigmoid_and_tanh import (
    compute_sigmoid,
    compute_tanh,
    sigmoid_table,
    tanh_table,
)

POWERS = {
    -2: 1672461947,
    -1: 1302514674,
    0: 790015084,
    1: 290630308,
    2: 39332535,
    3: 720401,
    4: 242,
}
"""exp(-2^k), with 31 fractional bits."""


def truncated(x, bits):
    """Computes x / 2^bits, rounded towards zero."""
    return np.where(x >= 0, x >> bits, -(-x >> bits))


def doubling_high_mul(a, b, n):
    product = np.asarray(a * b, np.int64)
    return truncated(product + np.where(product >= 0, 1 << (n - 1), 1 - (1 << (n - 1))), n)


def divided(x, exponent):
    """Computes RoundingDivideByPOT."""
    mask = (1 << exponent) - 1
    return (x >> exponent) + ((x & mask) > (mask >> 1) + (x < 0))


def shifted(x, exponent, n):
    """Computes SaturatingRoundingMultiplyByPOT for exponents above 0."""
    return np.clip(x << exponent, -(1 << n), (1 << n) - 1)


def constant(number, n):
    return int(divided(np.int64(number), 31 - n))


def exp_of_a_quarter(x, n):
    middle, third = (constant(number, n) for number in (1895147668, 715827883))
    x = x + (1 << (n - 3))
    x2 = doubling_high_mul(x, x, n)
    x3, x4 = doubling_high_mul(x2, x, n), doubling_high_mul(x2, x2, n)
    rest = divided(doubling_high_mul(divided(x4, 2) + x3, third, n) + x2, 1)
    return np.minimum(middle + doubling_high_mul(middle, x + rest, n), (1 << n) - 1)


def exp_of_negative(a, integer_bits, n):
    point = n - integer_bits
    quarter = 1 << (point - 2)
    last = (a & (quarter - 1)) - quarter
    result = exp_of_a_quarter(shifted(last, integer_bits, n), n)
    for exponent, power in POWERS.items():
        if integer_bits > exponent:
            is_set = (last - a) & (1 << (point + exponent))
            result = np.where(is_set, doubling_high_mul(result, constant(power, n), n), result)
    return np.where(a == 0, (1 << n) - 1, result)


def twice_reciprocal(a, n):
    """Computes 2 / (1 + a) for a from 0 to 1, with 2 integer bits."""
    total = a + (1 << n) - 1
    half = truncated(total + np.where(total >= 0, 1, -1), 1)
    x = constant(1515870810, n) + doubling_high_mul(half, constant(-1010580540, n), n)
    for _ in range(3):
        error = (1 << (n - 2)) - doubling_high_mul(half, x, n)
        x = x + shifted(doubling_high_mul(x, error, n), 2, n)
    return x


@pytest.mark.parametrize("integer_bits", range(6))
def test_gates_of_lstms(integer_bits):
    """Tests all 65,536 16-bit values."""
    x = np.arange(-(2**15), 2**15)
    above = shifted(twice_reciprocal(exp_of_negative(-abs(x), integer_bits, 15), 15), 1, 15)
    sigmoid = np.where(x > 0, above, np.where(x < 0, 2**15 - 1 - above, 2**14))
    np.testing.assert_array_equal(sigmoid_table(integer_bits), sigmoid)
    reciprocal = twice_reciprocal(exp_of_negative(-abs(x), integer_bits + 1, 15), 15)
    size = shifted(reciprocal - 2**13, 2, 15)
    np.testing.assert_array_equal(tanh_table(integer_bits), np.where(x < 0, -size, size * (x > 0)))


def test_curves_of_32_bits():
    """TFLite Micro's int8 kernels have 4 integer bits."""
    numbers = np.random.default_rng(0)
    x = np.concatenate([[0, 1, -1], numbers.integers(-(15 << 27), 15 << 27, 5000)])
    above = shifted(twice_reciprocal(exp_of_negative(-abs(x), 4, 31), 31), 1, 31)
    sigmoid = np.where(x > 0, above, np.where(x < 0, 2**31 - 1 - above, 2**30))
    np.testing.assert_array_equal(compute_sigmoid(tf.constant(x), 4), sigmoid)
    reciprocal = twice_reciprocal(exp_of_negative(-abs(x), 5, 31), 31)
    size = shifted(reciprocal - 2**29, 2, 31)
    np.testing.assert_array_equal(compute_tanh(tf.constant(x), 4), np.sign(x) * size)


def numbers_up_to(end, count=20_000):
    """Returns powers of two, their neighbours, and random integers of all sizes."""
    drawn = np.exp(np.random.default_rng(0).uniform(0, np.log(end), count)).astype(np.int64)
    powers = 2 ** np.arange(int(np.log2(end)) + 1)
    return np.unique(np.clip([*drawn, *powers, *powers + 1, *powers - 1, end], 0, end))


def test_exponentials_of_softmax():
    """Inputs have 5 integer bits, down to exp(-32)."""
    x = -numbers_up_to(2**31)
    np.testing.assert_array_equal(exponential(tf.constant(x), 5), exp_of_negative(x, 5, 31))


def test_reciprocals_of_softmax():
    x = numbers_up_to(2**31 - 1)
    expected = shifted(twice_reciprocal(x, 31), 1, 31)
    np.testing.assert_array_equal(saturate(shift(reciprocal(tf.constant(x)), 1), 31), expected)


def inverse_root(number):
    """Computes TFLite's GetInvSqrtQuantizedMultiplierExp: a multiplier and a shift to the right."""
    if number <= 1:
        return 2**31 - 1, 0
    shift = 11
    while number >= 2**29:
        number, shift = number // 4, shift + 1
    pairs = (31 - number.bit_length()) // 2 - 1
    number, shift = number << 2 * pairs, shift - pairs
    half, x = int(divided(np.int64(number >> 1), 1)), 2**28
    for _ in range(5):
        square = doubling_high_mul(x, x, 31)
        cube = shifted(doubling_high_mul(square, x, 31), 6, 31)
        next_x = doubling_high_mul(3 * 2**27, x, 31) - doubling_high_mul(half, cube, 31)
        x = int(shifted(next_x, 3, 31))
    x = int(doubling_high_mul(x, 1518500250, 31))
    return (x << -shift, 0) if shift < 0 else (x, shift)


def test_inverse_square_roots():
    numbers = numbers_up_to(2**31 - 1, 600)
    multipliers, exponents = inverse_square_root(tf.constant(numbers))
    expected = [inverse_root(int(number)) for number in numbers]
    np.testing.assert_array_equal(np.stack([multipliers, -exponents], -1), expected)
