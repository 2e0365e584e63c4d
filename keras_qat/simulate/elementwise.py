"""Kernels that compute one code from one of each input, or of a row: sums, products, activations.

All return codes of the output's grid that are not yet clipped. Where XNNPACK does not take an
operation, or its parameters, TFLite's own kernel runs instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.integer_kernels import int16
from keras_qat.simulate.arithmetic import (
    divide_by_power_of_two,
    fixed_point,
    high_product,
    inverse_square_root,
    multiply,
    requantize,
)
from keras_qat.simulate.codes import HIGH, LOW, Codes, Grid, round_away

__all__ = [
    "add",
    "convert",
    "elu",
    "hard_swish",
    "leaky_relu",
    "lookup",
    "prelu",
    "product",
    "relu",
    "table",
    "unit_norm",
]

Unary = Callable[[np.ndarray, Grid, Grid], np.ndarray]
"""From the steps of an input, its grid and the output's to codes of the output."""


def lookup(x: Codes, output: Grid, function: Unary) -> np.ndarray:
    """A function of one code: computed for all 256 of them, then looked up."""
    codes = function(np.arange(LOW, HIGH + 1) - x.zero_point, x.grid, output)
    return codes[x.codes.astype(np.intp) - LOW]


def add(kernels: str, a: Codes, b: Codes, output: Grid, sign: int = 1) -> np.ndarray:
    """a + b, or a - b with `sign` -1."""
    ratios = [each.scale / output.scale for each in (a, b)]
    if kernels == "xnnpack" and all(2**-10 <= ratio < 2**8 for ratio in ratios):
        return _xnnpack_add(a, b, ratios, sign) + output.zero_point
    # Both on a scale that holds either, with 20 more bits; then on the output's.
    common = 2 * np.float64(max(a.scale, b.scale))
    scaled = [
        multiply(each.steps.astype(np.int64) << 20, *fixed_point(each.scale / common))
        for each in (a, b)
    ]
    factor = fixed_point(common / (2.0**20 * np.float64(output.scale)))
    return multiply(scaled[0] + sign * scaled[1], *factor) + output.zero_point


def _xnnpack_add(a: Codes, b: Codes, ratios: list[np.float32], sign: int) -> np.ndarray:
    """The larger ratio becomes a multiplier of 21 bits; one rounding, halves up."""
    shift = 20 - (int(np.frexp(max(ratios))[1]) - 1)
    first, second = (int(np.rint(ratio * np.float32(2.0**shift))) for ratio in ratios)
    total = a.steps.astype(np.int64) * first + sign * b.steps.astype(np.int64) * second
    return (total + (1 << (shift - 1))) >> shift


def product(kernels: str, a: Codes, b: Codes, output: Grid) -> np.ndarray:
    """a * b."""
    ratio = a.scale * b.scale / output.scale
    taken = 2**-16 <= ratio < 2**8
    family = kernels if taken else "reference"
    return requantize(family, a.steps * b.steps, ratio) + output.zero_point


def convert(kernels: str, x: Codes, output: Grid) -> np.ndarray:
    """The same real values on another grid."""
    if x.grid.is_int16:
        return _in_int16(int16.convert, x, output)

    def function(steps: np.ndarray, grid: Grid, output: Grid) -> np.ndarray:
        ratio = grid.scale / output.scale
        if kernels == "xnnpack" and 2**-8 <= ratio <= 2**7:
            return _times_256th(steps, ratio) + output.zero_point
        exact = np.float64(grid.scale) / np.float64(output.scale)
        return requantize("reference", steps, exact) + output.zero_point

    return lookup(x, output, function)


def _times_256th(steps: np.ndarray, ratio: np.float32) -> np.ndarray:
    """Times a ratio that is rounded to a multiple of 1/256, rounded with halves up."""
    return (steps.astype(np.int64) * int(np.rint(np.float32(256) * ratio)) + 128) >> 8


def relu(kernels: str, x: Codes, output: Grid) -> np.ndarray:
    """The same real values; the caller clips them. XNNPACK does not take it."""
    if x.grid.is_int16:
        return _in_int16(int16.relu, x, output)

    def function(steps: np.ndarray, grid: Grid, output: Grid) -> np.ndarray:
        return requantize("reference", steps, grid.scale / output.scale) + output.zero_point

    return lookup(x, output, function)


def _in_int16(kernel: Callable[..., Any], x: Codes, output: Grid) -> np.ndarray:
    steps = (tf.constant(each, tf.float64) for each in (x.scale, output.scale))
    return np.asarray(kernel(tf.constant(x.codes, tf.int64), *steps))


def leaky_relu(kernels: str, x: Codes, output: Grid, slope: float) -> np.ndarray:
    """x above zero, slope * x below."""
    alpha = np.float32(slope)

    def function(steps: np.ndarray, grid: Grid, output: Grid) -> np.ndarray:
        above = grid.scale / output.scale
        below = above * alpha
        taken = 2**-8 <= above <= 2**7 and 2**-8 <= abs(below) <= 2**7
        if kernels == "xnnpack" and taken:
            branches = _times_256th(steps, above), _times_256th(steps, below)
        else:
            below = abs(grid.scale * alpha / output.scale)
            branches = (
                requantize("reference", steps, above),
                int(np.sign(alpha)) * requantize("reference", steps, below),
            )
        return np.where(steps >= 0, *branches) + output.zero_point

    return lookup(x, output, function)


def prelu(kernels: str, x: Codes, alpha: Codes, output: Grid) -> np.ndarray:
    """x above zero, alpha * x below. XNNPACK does not take it."""
    steps = x.steps
    above = requantize("reference", steps, x.scale / output.scale)
    product_ratio = x.scale * alpha.scale / output.scale
    below = requantize("reference", steps * alpha.steps, product_ratio)
    return np.where(steps >= 0, above, below) + output.zero_point


def hard_swish(kernels: str, x: Codes, output: Grid) -> np.ndarray:
    """x * relu6(x + 3) / 6 in 16 bits. XNNPACK does not take it."""

    def function(steps: np.ndarray, grid: Grid, output: Grid) -> np.ndarray:
        fine = grid.scale / np.float32(128)
        value = steps.astype(np.int64) << 7
        factor, exponent = _fixed_point_16(fine / output.scale)
        scaled = high_product(value, factor, 16)
        # The gate relu6(x + 3) / 6, from -1 to 1 at first.
        gate_factor, gate_exponent = _fixed_point_16(fine / np.float32(3 / 32768))
        gate = _saturate(value << max(gate_exponent - 1, 0))
        gate = high_product(gate, gate_factor, 16)
        if gate_exponent > 0:
            gate = _saturate(gate << 1)
        gate = divide_by_power_of_two(gate, max(-gate_exponent, 0))
        gate = (gate + 2**15) >> 1
        result = np.trunc(gate * scaled / 2**15).astype(np.int64)
        return divide_by_power_of_two(result, max(-exponent, 0)) + output.zero_point

    return lookup(x, output, function)


def unit_norm(x: Codes) -> np.ndarray:
    """Each code over the length of those along the last axis, in 128ths."""
    steps = x.steps.astype(np.int64)
    multiplier, exponent = inverse_square_root(np.sum(steps * steps, -1, keepdims=True))
    return multiply(steps, multiplier, exponent + 7)


def _fixed_point_16(number: np.float32) -> tuple[int, int]:
    multiplier, exponent = fixed_point(np.float64(number))
    return min((int(multiplier) + 2**15) >> 16, 2**15 - 1), int(exponent)


def _saturate(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -(2**15), 2**15 - 1)


def table(kernels: str, x: Codes, output: Grid, function: Callable[[Any], Any]) -> np.ndarray:
    """A real function of one code, rounded: sigmoid, tanh, gelu, elu.

    Both families compute in float32. XNNPACK adds the zero point first and rounds halves to even,
    but those of elu away from zero.
    """

    def codes(steps: np.ndarray, grid: Grid, output: Grid) -> np.ndarray:
        values = function(steps.astype(np.float32) * grid.scale).astype(np.float32)
        scaled = values * (np.float32(1) / output.scale)
        if kernels == "xnnpack":
            rounded = round_away if function is elu else np.rint
            return rounded(scaled + np.float32(output.zero_point)).astype(np.int64)
        return round_away(scaled).astype(np.int64) + output.zero_point

    return lookup(x, output, codes)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), in float64."""
    return 1.0 / (1.0 + np.exp(-x.astype(np.float64)))


def tanh(x: np.ndarray) -> np.ndarray:
    """Hyperbolic tangent, in float64."""
    return np.tanh(x.astype(np.float64))


def elu(x: np.ndarray) -> np.ndarray:
    """exp(x) - 1 below zero, x above."""
    return np.where(x < 0, np.exp(np.minimum(x, 0)) - np.float32(1), x)


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution's cumulative function, in TFLite's float32 spelling."""
    scaled = x * np.float32(-math.sqrt(0.5))
    erfc = np.array([math.erfc(each) for each in scaled], np.float32)
    return np.float32(0.5) * x * erfc


def gelu_approximate(x: np.ndarray) -> np.ndarray:
    """The same, approximated with a hyperbolic tangent."""
    cube = x + np.float32(0.044715) * x * x * x
    inner = np.float32(math.sqrt(2 / math.pi)) * cube
    return np.float32(0.5) * x * (np.float32(1) + tanh(inner).astype(np.float32))
