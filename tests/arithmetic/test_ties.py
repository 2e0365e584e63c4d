"""Tests that ranges of inputs are chosen so that no k / n lies halfway between two levels."""

from fractions import Fraction

import numpy as np
import pytest

from keras_qat.arithmetic.quant_params import ENOUGH, TRIES, WIDER, find_share_off_ties, widen_range


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_no_part_of_a_range_is_a_tie(bits):
    """Checks for all n, in exact arithmetic, whether any k / n is a tie."""
    steps = Fraction(2**bits - 1) / (1 + Fraction(1, round(1 / WIDER)))
    ties = [Fraction(2 * code + 1, 2) / steps for code in range(2**bits - 1)]
    denominators = {tie.denominator for tie in ties if tie < 1}
    assert all(denominator % 1019 == 0 for denominator in denominators)
    assert min(denominators) > 1000
    assert all(10**6 % denominator and 2**40 % denominator for denominator in denominators)


def test_a_range_of_other_ends_moves_off_the_ties_of_its_values():
    """After a mean was subtracted, the values may have any distance to the grid."""
    scale = (1 + WIDER) / 255
    values = np.float32([-0.25, 0.5 * scale, 0.75] * 2)  # The second value is a tie.
    share = find_share_off_ties(-0.25, 0.75, values, 8)
    assert WIDER < share <= TRIES * WIDER
    steps = values / ((1 + share) / 255)
    assert np.min(np.abs(steps - np.floor(steps) - 0.5)) > ENOUGH
    assert find_share_off_ties(-0.25, 0.75, values[[0, 2, 0]], 8) == WIDER


@pytest.mark.parametrize("bits", [8, 4])
def test_it_is_the_first_share_that_suffices_or_the_best_one(bits):
    """Only values in the range count, including its ends."""
    levels, multiples = 2**bits - 1, WIDER * np.arange(1, TRIES + 1)
    for seed in range(40):
        numbers = np.random.default_rng(seed)
        tie = (numbers.integers(levels) + 0.5) * (1 + multiples[seed % 3])
        low = -float(np.float32(tie))  # Or the upper end is a tie.
        low, high = (low, low + levels) if seed % 2 else (-low - levels, -low)
        inside = np.float32([low, high, *numbers.uniform(low, high, seed % 4)])
        values = np.append(np.repeat(inside, 3), [low - 0.5, high + 0.5]).astype(np.float32)
        steps = inside[:, None] * levels / ((high - low) * (1 + multiples))
        distances = np.min(np.abs(steps - np.floor(steps) - 0.5), axis=0)
        is_far = distances > ENOUGH
        first = np.argmax(is_far) if is_far.any() else np.argmax(distances)
        assert find_share_off_ties(low, high, values, bits) == multiples[first], seed


def test_numbers_that_do_not_repeat_are_on_no_grid():
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    assert find_share_off_ties(float(values.min()), float(values.max()), values, 8) == WIDER


def test_of_nothing_it_is_the_least():
    assert find_share_off_ties(0.0, 0.0, np.zeros(3, np.float32), 8) == WIDER
    assert find_share_off_ties(0.0, 1.0, np.float32([2.0]), 8) == WIDER
    assert widen_range(0.0, 0.0) == 0
