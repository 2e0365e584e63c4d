"""What TFLite's int16 kernels compute, in plain TensorFlow: codes in, codes out, exactly.

Codes are int64 tensors, zero being code 0. Steps, the real values of one code, are float64
scalars that hold the float32 numbers of the file. The integer simulation and, at inference, the
quantization-aware model both compute with these functions. Convolutions are in
`keras_qat.layers.int16`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.fixed_point import (
    divide,
    exponent_of,
    fixed_point,
    multiply,
    multiply_sums,
    shift,
    shift_back,
)
from keras_qat.integer_kernels.grid import ratio_of, single
from keras_qat.integer_kernels.inputs import axis_of, compute, constant, interpolated, operands
from keras_qat.keras2.graph import Call

__all__ = [
    "INT16_KERNELS",
    "OPTIMIZED",
    "convert",
    "relu",
]

LOW, HIGH = -(2**15), 2**15 - 1

Kernel = Callable[[Call, list[Any], list[Any], Any], Any]
"""From a call, the codes and steps of its inputs and its output's step to codes, not clipped."""


def _saturate(codes: Any) -> Any:
    return tf.clip_by_value(codes, tf.cast(LOW, codes.dtype), tf.cast(HIGH, codes.dtype))


def convert(codes: Any, step: Any, output: Any) -> Any:
    """The same real values in other steps."""
    return multiply(codes, fixed_point(step / output))


def relu(codes: Any, step: Any, output: Any) -> Any:
    """The same for a ReLU by itself, whose result the caller clips."""
    return multiply(codes, fixed_point(ratio_of(step, over=output)))


def _add(
    call: Call,
    codes: list[Any],
    steps: list[Any],
    output: Any,
    sign: int = 1,
    optimized: bool = False,
) -> Any:
    """a + b, or a - b with `sign` -1, each with 15 more bits on a scale that holds either.

    The `optimized` kernel rounds each of them once, the other one twice.
    """
    tensors, steps = _operands(call, codes, steps)
    common = 2 * tf.maximum(*steps)
    scaled = []
    for x, step in zip(tensors, steps, strict=True):
        multiplier, exponent = fixed_point(step / common)
        bits = 0 if optimized else 15
        scaled.append(multiply(shift(x, bits), (multiplier, exponent + 15 - bits)))
    return multiply(scaled[0] + sign * scaled[1], fixed_point(common / (2**15 * output)))


def _product(call: Call, codes: list[Any], steps: list[Any], output: Any) -> Any:
    (a, b), (step_a, step_b) = _operands(call, codes, steps)
    return multiply(a * b, fixed_point(ratio_of(step_a, step_b, over=output)))


def _operands(call: Call, codes: list[Any], steps: list[Any]) -> tuple[list[Any], list[Any]]:
    """Codes and steps of the tensors and constants that a call computes with."""
    first, second = zip(
        *operands(call, list(zip(codes, steps, strict=True)), _constant), strict=True
    )
    return list(first), list(second)


def _constant(values: np.ndarray) -> tuple[Any, Any]:
    """A constant: 256 codes over its values and zero, which are then widened."""
    steps, scale, zero_point = constant(values)
    step = np.float32(scale / (128 if zero_point else 256))
    return tf.constant(np.round(steps * scale / step), tf.int64), tf.constant(step, tf.float64)


def _average(call: Call, codes: list[Any], steps: list[Any], output: Any) -> Any:
    """Averages, halves away from zero."""
    averages = compute(call, [tf.cast(codes[0], tf.float64)])
    # Halves are off by far less than the distance to the next quotient of whole numbers.
    away = tf.sign(averages) * tf.floor(tf.abs(averages) + 0.5 + 1e-7)
    return tf.cast(away, tf.int64)


def _mean(call: Call, codes: list[Any], steps: list[Any], output: Any) -> Any:
    """Sums times a multiplier that one over their number is divided into."""
    (x,) = codes
    means = compute(call, [tf.cast(x, tf.float64)])
    sizes = (tf.size(each, tf.int64) for each in (x, means))
    count = next(sizes) // tf.maximum(next(sizes), 1)
    sums = tf.cast(tf.round(means * tf.cast(count, tf.float64)), tf.int64)
    multiplier, exponent = fixed_point(steps[0] / output)
    bits = exponent_of(tf.cast(count, tf.float64))
    bits = tf.minimum(tf.minimum(bits, 32), 31 + exponent)
    return multiply(sums, (shift(multiplier, bits) // count, exponent - bits))


def _matrix_product(call: Call, codes: list[Any], steps: list[Any], output: Any) -> Any:
    sums = compute(call, [tf.cast(each, tf.float64) for each in codes])
    ratio = single(steps[0] * steps[1]) / output
    return multiply_sums(tf.cast(tf.round(sums), tf.int64), fixed_point(ratio))


def _leaky_relu(call: Call, codes: list[Any], steps: list[Any], output: Any) -> Any:
    (x,), (step,) = codes, steps
    slope = -compute(call, [tf.constant([-1.0])])[0]
    below = ratio_of(step, tf.cast(slope, tf.float64), over=output)
    below = tf.cast(tf.sign(below), tf.int64) * multiply(x, fixed_point(tf.abs(below)))
    return tf.where(x >= 0, multiply(x, fixed_point(ratio_of(step, over=output))), below)


def _sigmoid(call: Call, codes: list[Any], steps: list[Any], output: Any) -> Any:
    """From a table of 256 values, 1/24 apart, with 512 places between two of them."""
    x, size = _place_in_table(codes[0], steps[0])
    ahead = _between(size, 9)
    result = tf.where(x >= 0, ahead + 2**9, 2**25 - ahead + 2**9 - 1)
    return shift_back(result, 10)


def _tanh(call: Call, codes: list[Any], steps: list[Any], output: Any) -> Any:
    """2 sigmoid(2x) - 1 with the same table."""
    x, size = _place_in_table(codes[0], steps[0])
    ahead = _between(size, 8)
    result = tf.where(x >= 0, ahead - 2**23 + 2**7, 2**23 - ahead + 2**7 - 1)
    return shift_back(result, 8)


def _place_in_table(x: Any, step: Any) -> tuple[Any, Any]:
    """A number in steps of 1/12288, and its magnitude: times a multiplier of 14 to 15 bits."""
    number = step * (3 * 4096.0)
    bits = tf.zeros([], tf.int64)
    for _ in range(31):
        small = number <= 32767.0 / 2.0
        number, bits = tf.where(small, 2 * number, number), bits + tf.cast(small, tf.int64)
    half = shift_back(shift(tf.ones_like(bits), bits), 1)
    x = shift_back(x * tf.cast(number, tf.int64) + half, bits)
    return x, tf.abs(x)


def _between(size: Any, bits: int) -> Any:
    """Linear interpolation in the table of the sigmoid, with `bits` more bits."""
    table = tf.constant(_sigmoid_table(), tf.int64)
    last = 2 * HIGH + 1 if bits == 8 else HIGH * 2
    index = shift_back(size, bits)
    low, high = (tf.gather(table, tf.clip_by_value(index + each, 0, 255)) for each in (0, 1))
    found = shift(low, bits) + (size & (2**bits - 1)) * (high - low)
    return tf.where(index >= 255, shift(tf.constant(last, tf.int64), bits), found)


@functools.cache
def _sigmoid_table() -> np.ndarray:
    """sigmoid(k / 24) in 65536ths, higher by half of what a line falls short of the next curve.

    That is a sixteenth of the curvature. The last value stands for all above.
    """
    sigmoid = 1 / (1 + np.exp(-np.arange(256) / 24))
    curvature = sigmoid * (1 - sigmoid) * (2 * sigmoid - 1) / 24**2
    values = np.floor(65536 * (sigmoid + curvature / 16) + 0.5).astype(np.int64)
    values[-1] = 65535
    return values


def _softmax(call: Call, codes: list[Any], steps: list[Any], output: Any) -> Any:
    """Exponentials and one over their sum from tables of 512 steps, over the layer's axis."""
    axis = axis_of(call)
    x = codes[0]
    below = x - tf.reduce_max(x, axis, keepdims=True)
    below = multiply(below, fixed_point(single(steps[0]) / (10.0 / 65535.0)))
    exponentials = _look_up(_saturate(below + HIGH), _exp_table())
    sums = tf.reduce_sum(exponentials, axis, keepdims=True)
    length = exponent_of(tf.cast(sums, tf.float64)) + 1
    normalized = shift_back(shift(sums, 31 - length) + 2**13, 14)
    reciprocal = _look_up(_saturate(normalized - 2**15 - 2**16), _reciprocal_table())
    bits = length - 1
    half = shift(tf.ones_like(bits), bits - 1)
    return tf.clip_by_value(shift_back(exponentials * reciprocal + half, bits), 0, HIGH)


def _look_up(x: Any, table: np.ndarray) -> Any:
    """Linear interpolation in a table of 513 values, 128 codes apart."""
    values = tf.constant(table, tf.int64)
    index = shift_back(x, 7) + 256
    low, high = tf.gather(values, index), tf.gather(values, index + 1)
    return low + shift_back((high - low) * (x & 127) + 64, 7)


@functools.cache
def _exp_table() -> np.ndarray:
    return _table(np.exp, 10 / 65535, HIGH, 2 / 65535, np.float64)


@functools.cache
def _reciprocal_table() -> np.ndarray:
    return _table(lambda x: 1 / (1 + x), 1 / 65535, LOW, 2 / 65535, np.float64)


def _table(
    function: Callable[[Any], Any], step: Any, zero_point: int, output: Any, dtype: Any
) -> np.ndarray:
    """A function at 513 places. Half of the error between two of them is taken off."""
    step, output, count = dtype(step), dtype(output), dtype(512)
    low, high = step * dtype(LOW - zero_point), step * dtype(HIGH - zero_point)
    width = (high - low) / count
    inverse = dtype(65536) / (output * dtype(HIGH) - output * dtype(LOW))
    places = low + np.arange(512).astype(dtype) * width
    here = _round(function(places) * inverse)
    behind = function(low + np.arange(1, 513).astype(dtype) * width) * inverse
    middle = _round(function(places + width / dtype(2)) * inverse)
    error = _round((behind + here) / dtype(2)) - middle
    values = np.append(here - _round(error / dtype(2)), _round(function(high) * inverse))
    return np.clip(values, LOW, HIGH).astype(np.int64)


def _round(x: np.ndarray) -> np.ndarray:
    """To whole numbers, halves away from zero, in the numbers' own precision."""
    return np.copysign(np.floor(np.abs(x) + np.asarray(0.5, x.dtype)), x)


def _resize(call: Call, codes: list[Any], steps: list[Any], output: Any) -> Any:
    """Bilinear interpolation between pixel centres, with shares of 1024ths."""
    return divide(interpolated(call, codes[0], _neighbours, 10), tf.constant(20, tf.int64))


def _neighbours(old: Any, new: Any) -> tuple[Any, Any, Any]:
    """For each pixel of a resized axis the two next to it, and the second's share."""
    old, new = (tf.cast(each, tf.int64) for each in (old, new))
    scale = (shift(old, 10) + new // 2) // new
    place = tf.range(new) * scale + scale // 2 - 2**9
    low = tf.maximum(shift_back(place, 10), 0)
    high = tf.minimum(shift_back(place + 1023, 10), old - 1)
    return low, tf.maximum(high, 0), place - shift(low, 10)


INT16_KERNELS: dict[str, Kernel] = {
    "add": _add,
    "subtract": functools.partial(_add, sign=-1),
    "multiply": _product,
    "product": _matrix_product,
    "mean": _mean,
    "average_pooling": _average,
    "leaky_relu": _leaky_relu,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "softmax": _softmax,
    "resize": _resize,
}
"""Kind of a call, as in `kinds.kind_of` -> its kernel."""

OPTIMIZED: dict[str, Kernel] = {"add": functools.partial(_add, optimized=True)}
"""What TFLite's optimized kernels compute otherwise: 16 codes at a time, if both inputs have one
shape. Those that are left over are computed as above."""
