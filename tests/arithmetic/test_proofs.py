"""Proves with an SMT solver that fixed-point arithmetic equals TFLite's for all inputs.

The proofs run the library's own code, with operations on bit vectors instead of TensorFlow's. They
compare it with formulas for the definitions in TFLite's `kernels/internal/common.h` and gemmlowp's
`fixedpoint.h`.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from keras_qat.arithmetic import fixed_point as arithmetic

z3 = pytest.importorskip("z3", reason="the solver is not installed: pip install z3-solver")

MULTIPLIERS = 2**30, 2**31 - 1
"""The range of the multipliers that `to_fixed_point` returns, except 0."""


def vector(value: int) -> Any:
    return z3.BitVecVal(value, 64)


def _cast(x: Any, dtype: str) -> Any:
    x = vector(x) if isinstance(x, int) else x
    return z3.SignExt(32, z3.Extract(31, 0, x)) if dtype == "int32" else x


def _where(condition: Any, one: Any, other: Any) -> Any:
    return z3.If(condition, one, other)


class Sign:
    """The sign of an integer, as a factor. Solvers are slow for other products."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __mul__(self, y: Any) -> Any:
        return _where(self.x > 0, y, _where(self.x < 0, -y, vector(0)))


BIT_VECTORS = SimpleNamespace(
    int32="int32",
    int64="int64",
    float64="float64",
    bitwise=SimpleNamespace(left_shift=lambda x, n: x << n, right_shift=lambda x, n: x >> n),
    cast=_cast,
    bitcast=lambda x, dtype: x,
    constant=_cast,
    abs=lambda x: _where(x < 0, -x, x),
    sign=Sign,
    ones_like=lambda x: vector(1),
    maximum=lambda x, y: _where(x > y, x, y),
    minimum=lambda x, y: _where(x < y, x, y),
    clip_by_value=lambda x, low, high: _where(x < low, low, _where(x > high, high, x)),
    where=_where,
)
"""The operations of TensorFlow in `fixed_point.py`, on 64-bit vectors; floats are their bits."""


@pytest.fixture
def code(monkeypatch) -> Iterator[Any]:
    monkeypatch.setattr(arithmetic, "tf", BIT_VECTORS)
    return arithmetic


def prove(statement: Any, *given: Any, logic: str = "QF_UFBV") -> None:
    """Fails with a counterexample unless a statement holds for all values of its variables."""
    solver = z3.SolverFor(logic)
    solver.add(*given, z3.Not(statement))
    answer = solver.check()
    assert answer == z3.unsat, f"{answer}: {solver.model() if answer == z3.sat else ''}"


def int32(name: str) -> Any:
    return z3.SignExt(32, z3.BitVec(name, 32))


def is_between(x: Any, low: int, high: int) -> Any:
    return z3.And(x >= low, x <= high)


def rounding_divide_by_power_of_two(x: Any, exponent: Any) -> Any:
    """Returns TFLite's RoundingDivideByPOT."""
    mask = (vector(1) << exponent) - 1
    threshold = (mask >> 1) + z3.If(x < 0, vector(1), vector(0))
    return (x >> exponent) + z3.If((x & mask) > threshold, vector(1), vector(0))


def upper_half(product: Any) -> Any:
    """Returns the last step of gemmlowp's SaturatingRoundingDoublingHighMul, which truncates."""
    nudged = product + z3.If(product >= 0, vector(2**30), vector(1 - 2**30))
    return z3.If(nudged >= 0, nudged >> 31, -(-nudged >> 31))


@pytest.mark.parametrize("exponent", range(32))
def test_dividing_by_a_power_of_two(code, exponent):
    x, bits = int32("x"), vector(exponent)
    prove(code.divide(x, bits) == rounding_divide_by_power_of_two(x, bits))


def test_upper_half_of_a_product():
    """The code rounds halves up. TFLite has a formula with two cases."""
    product = z3.BitVec("product", 64)
    prove((product + 2**30) >> 31 == upper_half(product), is_between(product, -(2**62), 2**62))


@pytest.mark.parametrize("exponent", range(-31, 31))
def test_multiplying_by_a_number_in_fixed_point(code, monkeypatch, exponent):
    """Proves it for all 32-bit sums and all multipliers."""
    products = z3.Function("product", z3.BitVecSort(64), z3.BitVecSort(64), z3.BitVecSort(64))
    monkeypatch.setattr(code, "high_product", lambda a, b: (products(a, b) + 2**30) >> 31)
    x, multiplier = int32("x"), z3.BitVec("multiplier", 64)
    shifted = _cast(x << max(exponent, 0), "int32")
    expected = rounding_divide_by_power_of_two(
        upper_half(products(shifted, multiplier)), vector(max(-exponent, 0))
    )
    prove(
        code.multiply(x, (multiplier, vector(exponent))) == expected,
        is_between(multiplier, *MULTIPLIERS),
        is_between(products(shifted, multiplier), -(2**62), 2**62),
    )


def test_fifteen_bits_of_a_multiplier(code):
    multiplier = z3.BitVec("multiplier", 64)
    prove(
        code.upper_bits((multiplier, vector(0)))[0]
        == z3.If(multiplier < 0x7FFF0000, (multiplier + (1 << 15)) >> 16, vector(0x7FFF)),
        is_between(multiplier, *MULTIPLIERS),
    )


def test_a_number_in_fixed_point(code):
    """TFLite's QuantizeMultiplier is frexp, times 2^31, with halves rounded away from zero."""
    bits = z3.BitVec("bits", 64)
    exponent = (bits >> 52) - 1022
    fraction = z3.fpBVToFP(z3.Concat(z3.BitVecVal(1022, 12), z3.Extract(51, 0, bits)), z3.Float64())
    scaled = z3.fpMul(z3.RNE(), fraction, z3.FPVal(2.0**31, z3.Float64()))
    rounded = z3.fpToSBV(z3.RTZ(), z3.fpRoundToIntegral(z3.RNA(), scaled), z3.BitVecSort(64))
    carries = rounded == 2**31
    multiplier = z3.If(carries, rounded / 2, rounded)
    shift = z3.If(carries, exponent + 1, exponent)
    too_small = shift < -31
    ours, our_shift = code.to_fixed_point(bits)
    prove(
        z3.And(
            ours == z3.If(too_small, vector(0), multiplier), z3.Or(our_shift == shift, too_small)
        ),
        is_between(bits >> 52, 1, 2046),
        logic="QF_BVFP",
    )


def test_exact_multipliers_lose_nothing_in_fifteen_bits(code):
    """Multipliers change by at most 2^-14, and are never powers of two."""
    bits = z3.BitVec("bits", 64)
    exact = code.exact_multiplier(bits)
    multiplier, exponent = code.to_fixed_point(exact)
    prove(
        z3.And(
            code.upper_bits((multiplier, exponent))[0] << 16 == multiplier,
            exact & (2**52 - 1) != 0,
            z3.If(exact > bits, exact - bits, bits - exact) <= 2**38,
        ),
        is_between(bits >> 52, 1023 - 31, 2045),
    )
