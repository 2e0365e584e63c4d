"""Tests sums next to each output step and at the ends: file, implementation and Python integers.

A sum is set by a bias and weights of zero. The Python integers share no code with the library.
"""

import dataclasses
from fractions import Fraction
from math import floor, frexp

import numpy as np
import pytest

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.read_model import read_model
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.registry import op_named
from keras_qat.ops.requantize import REQUANTIZE
from tests.comparison import RUNNABLE
from tests.helpers import build_model, keras, layers
from tests.ops.harness import (
    BATCH,
    assert_same,
    in_integers,
    make_node,
    node_of,
    random_inputs,
    with_ends,
)

NEXT = 1 + 2.0**-23
FACTORS = (
    *(2.0**-1, 2.0**-4, 2.0**-7, 3 * 2.0**-6, 255 * 2.0**-11),
    *(2.0**-4 * NEXT, 2.0**-4 * (1 - 2.0**-24), 3 * 2.0**-6 * NEXT, 0.0123, 0.3, 0.9),
)
"""Factors of sums. With the first factors, which are short, every other half is a tie."""

RATIOS = (
    *(2.0**-8, 2.0**-3, 0.5, 1.0, 1.5, 2.0, 128.0, 255 / 256, 0.5 + 2.0**-9, 2.0**-4 + 2.0**-9),
    *(2.0**-8 * NEXT, 2.0**-8 * (1 - 2.0**-24), 2.0**7 * NEXT, 128.501, 2.0**-9, 2.0**-10),
    *(0.0123, 1.37),
)
"""Ratios of scales: multiples of 256ths, ties between two of them, and limits of kernels."""


def single(x: Fraction) -> Fraction:
    """Rounds to float32."""
    if not x:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    return round(x / unit) * unit


def away(x: Fraction) -> int:
    """Rounds halves away from zero."""
    return floor(abs(x) + Fraction(1, 2)) * (1 if x >= 0 else -1)


def multiplier(factor: float, bits: int) -> tuple[int, int]:
    """Returns a factor as an integer of `bits` bits, and the shift that follows a product."""
    mantissa, exponent = frexp(factor)
    whole = away(Fraction(mantissa) * 2**31)
    if whole == 2**31:
        whole, exponent = 2**30, exponent + 1
    if bits == 15:
        whole = min((whole + 2**15) >> 16, 2**15 - 1)
    return whole, bits - exponent


def rounded_twice(x: int, factor: float) -> int:
    """Rounds to 31 bits, halves up, then by the remaining bits, halves away from zero."""
    whole, bits = multiplier(factor, 31)
    left = max(31 - bits, 0)
    high = ((x << left) * whole + 2**30) >> 31
    return away(Fraction(high, 2 ** (max(bits, 31) - 31)))


def rounded_once(x: int, factor: float) -> int:
    """Multiplies by 15 bits and rounds halves up."""
    whole, bits = multiplier(factor, 15)
    return (x * whole + 2 ** (bits - 1)) >> bits


def in_float32(x: int, factor: float) -> int:
    return round(single(single(Fraction(x)) * Fraction(factor)))


SUMS = {
    **{("dense", 8, family): in_float32 for family in ("xnnpack", "xnnpack_arm64")},
    **{("conv", 8, family): in_float32 for family in ("xnnpack", "xnnpack_arm64")},
    ("dense", 8, "reference"): lambda x, factor: away(x * Fraction(factor)),
    ("conv", 8, "reference"): rounded_twice,
    ("dense", 8, "tflm"): rounded_twice,
    ("conv", 8, "tflm"): rounded_twice,
    **{("conv", 16, family): rounded_once for family in RUNNABLE},
}
"""Operator, bits and family -> how sums are rescaled."""


def accumulators(factor: float, codes: range) -> list[int]:
    """Returns sums next to each step, and the largest sums that files can hold."""
    steps = [floor((code + Fraction(1, 2)) / Fraction(factor)) for code in codes]
    near = {step + side for step in steps for side in (-1, 0, 1, 2)}
    ends = (2**24 - 1, 2**24, 2**31 - 128)
    return sorted(near | {sign * end for end in ends for sign in (-1, 1)})


def with_sums(kind: str, bits: int, factor: float, sums: list[int]) -> Node:
    """Returns a node whose output channels have these sums for any input."""
    count = len(sums)
    layer = layers.Dense(count) if kind == "dense" else layers.Conv2D(count, 1)
    *_, call = read_model(build_model((1,) if kind == "dense" else (1, 1, 1), layer)).calls
    node = make_node(call, bits, np.random.default_rng(0), per_channel=False)
    assert node.weights is not None
    weights = dataclasses.replace(
        node.weights,
        q=np.zeros_like(node.weights.q),
        scale=np.full_like(node.weights.scale, factor),
        bias=np.array(sums, np.float64),
    )
    ends = [QuantParams(np.float32(0.5), zero if bits == 8 else 0, bits) for zero in (3, -5)]
    return with_ends(node, *ends, weights=weights)


def clipped(values: list[int], params: QuantParams) -> np.ndarray:
    shifted = np.array([value + int(params.zero_point) for value in values], object)
    return np.clip(shifted, params.lowest, params.highest).astype(np.int64)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "bits", "family"), SUMS)
def test_sums_beside_each_step(kind, bits, family):
    for factor in map(float, np.float32(FACTORS)):
        codes = range(-256, 257) if bits == 8 else range(-33_000, 33_000, 257)
        sums = accumulators(factor, codes)
        node = with_sums(kind, bits, factor, sums)
        (x,) = node.inputs
        q = {x.name: np.full((BATCH, *x.shape[1:]), 7, x.params.dtype)}
        (values,) = in_integers(node, q, family)
        expected = clipped([SUMS[kind, bits, family](x, factor) for x in sums], node.output.params)
        np.testing.assert_array_equal(values[0].reshape(-1), expected, str(factor))
        if family in RUNNABLE:
            assert_same(node, q, family, f"factor {factor}")


def in_256ths(q: int, ratio: float) -> int:
    """Multiplies by 256ths for ratios from 2^-8 to 2^7, rounding halves up."""
    if 2.0**-8 <= ratio <= 2.0**7:
        return (q * round(256 * Fraction(ratio)) + 128) >> 8
    return fine_steps(q, ratio)


def fine_steps(q: int, ratio: float) -> int:
    """Rounds twice. For ratios below 2^-8, first converts to 128 steps per step."""
    steps = 128 if ratio < 2.0**-8 else 1
    return rounded_twice(q * steps, ratio / steps)


REQUANTIZED = {
    **dict.fromkeys(("xnnpack", "xnnpack_arm64"), in_256ths),
    **dict.fromkeys(("reference", "tflm"), fine_steps),
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "tflm")) for name in REQUANTIZED],
)
def test_all_values_with_another_scale(family):
    """Tests all differences of an int8 value and a zero point, -255 to 255."""
    for ratio in map(float, np.float32(RATIOS)):
        for zero_point in (-128, 127):
            before = QuantParams(np.float32(ratio), zero_point, 8)
            after = QuantParams(np.float32(1), 1, 8)
            x = Tensor("x", (None, 256), "float32", before)
            output = Tensor("output", (None, 256), "float32", after)
            node = Node("requantize", REQUANTIZE, {}, None, (x,), (output,))
            q = np.arange(-128, 128).astype(np.int8)[None]
            (values,) = in_integers(node, {"x": q}, family)
            numbers = [REQUANTIZED[family](int(code) - zero_point, ratio) for code in q[0]]
            np.testing.assert_array_equal(values[0], clipped(numbers, after), str(ratio))
            if family in RUNNABLE:
                assert_same(node, {"x": np.repeat(q, BATCH, 0)}, family, f"ratio {ratio}")


GATES = (
    *((-3530, 1145, 5298, -3920), (-1725, 5792, 6337, -5290), (5676, -3641, 1920, 6008)),
    *((-4478, 5024, 1526, 4949), (2901, -1849, 6289, 3909), (3469, -1053, 7553, 5251)),
)
"""Gates of an LSTM, in steps of 2^-12.

Within four time steps, the output depends on the rounding of a product of cell state and forget
gate. This holds for one of 32,768 products.
"""


@pytest.mark.parametrize(("bits", "family"), [*((8, name) for name in RUNNABLE), (16, "tflm")])
def test_products_in_an_lstm_that_are_rounded_once_or_twice(bits, family):
    """The gates are set by biases and weights of zero."""
    inputs = keras.Input((4, 1))
    layer = layers.LSTM(len(GATES), return_sequences=True)
    *_, call = read_model(keras.Model(inputs, layer(inputs))).calls
    node = make_node(call, bits, np.random.default_rng(0))
    assert node.weights is not None
    assert node.weights.recurrent is not None
    recurrent = dataclasses.replace(node.weights.recurrent, q=0 * node.weights.recurrent.q)
    weights = dataclasses.replace(
        node.weights,
        q=0 * node.weights.q,
        scale=np.full_like(node.weights.scale, 2.0**-8),
        bias=np.transpose(GATES).reshape(-1).astype(np.float64),
        recurrent=recurrent,
    )
    x = dataclasses.replace(node.inputs[0], params=QuantParams(np.float32(2.0**-4), 0, bits))
    node = dataclasses.replace(node, weights=weights, inputs=(x,))
    q = np.zeros((BATCH, 4, 1), x.params.dtype)
    assert_same(node, {x.name: q}, family)


@pytest.mark.parametrize("family", ["tflm", "reference"])
@pytest.mark.parametrize(
    ("scales", "total"),
    [
        ((0.0978483036160469, 0.05939713120460510, 1.057582378387451), 7369),
        ((0.06138083338737488, 0.009139201603829861, 0.11984477192163467), 2456),
    ],
)
def test_products_of_matrices_whose_scales_are_multiplied_in_double_precision(
    scales, total, family
):
    """For sums near a half, a product of scales in float32 would lead to another step."""
    node, numbers = node_of(op_named("matmul"), 8, 1)
    node = with_ends(node, *(QuantParams(np.float32(scale), 0) for scale in scales))
    given = random_inputs(node, numbers)
    rows, columns = (given[item.name] for item in node.inputs)
    columns = columns if node.attributes["transposed"][1] else np.swapaxes(columns, -1, -2)
    rows[..., 2:], columns[..., 2:] = 0, 0
    rows[..., :2], columns[..., :2] = (127, 1), divmod(total, 127)
    assert_same(node, given, family)
