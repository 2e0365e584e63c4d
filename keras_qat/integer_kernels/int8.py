"""What XNNPACK computes without weights, in plain TensorFlow: steps in, steps out, exactly.

Where XNNPACK takes no such operation, TFLite's own kernel runs, and is meant. Steps are float32
tensors of whole numbers, counted from the real zero; `grid.Grid` says what they stand for. Results
may lie outside the range. Training goes without: there it would cost time and teach nothing.
Convolutions are in `keras_qat.layers.int8`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.fixed_point import (
    divide,
    exponent_of,
    fixed_point,
    inverse_square_root,
    multiply,
    power_of_two,
    shift,
    shift_back,
    upper_bits,
)
from keras_qat.branching import traced_once
from keras_qat.integer_kernels.grid import Grid, ratio_of, round_away, single
from keras_qat.integer_kernels.inputs import (
    axis_of,
    compute,
    constant,
    interpolated,
    operands,
)
from keras_qat.keras2.graph import Call
from keras_qat.operations import argument

__all__ = ["INT8_KERNELS"]

Kernel = Callable[[Call, list[Any], list[Grid], Grid], Any]
"""From a call, the steps of its inputs, their grids and its output's to steps of the output."""


def _times(steps: Any, ratio: Any) -> Any:
    """Whole numbers times a ratio in float32, halves to the even neighbour."""
    return tf.round(steps * tf.cast(ratio, tf.float32))


def _add(call: Call, steps: list[Any], grids: list[Grid], output: Grid, sign: int = 1) -> Any:
    """a + b, or a - b with `sign` -1: the larger ratio becomes a multiplier of 21 bits.

    Rounded once, halves up. XNNPACK leaves ratios below 2^-10 and above 2^8 to TFLite's kernel;
    here they are rounded in the same way.
    """
    tensors, scales = _operands(call, steps, grids)
    a, b = (tf.cast(each, tf.int32) for each in tensors)
    first, second, bits, half = _multipliers(*scales, output.scale)
    total = a * first + b * (sign * second) + half
    return tf.cast(tf.bitwise.right_shift(total, bits), tf.float32)


@traced_once
def _multipliers(a: Any, b: Any, output: Any) -> tuple[Any, Any, Any, Any]:
    """What the steps of a sum's inputs are multiplied by, and bits to drop from it, and half."""
    ratios = [ratio_of(each, over=output) for each in (a, b)]
    bits = 20 - exponent_of(tf.maximum(*ratios))
    first, second = (tf.cast(tf.round(ratio * power_of_two(bits)), tf.int32) for ratio in ratios)
    half = shift(tf.ones_like(bits), bits - 1)
    return first, second, tf.cast(bits, tf.int32), tf.cast(half, tf.int32)


def _product(call: Call, steps: list[Any], grids: list[Grid], output: Grid) -> Any:
    (a, b), scales = _operands(call, steps, grids)
    return _times(a * b, ratio_of(*scales, over=output.scale))


def _operands(call: Call, steps: list[Any], grids: list[Grid]) -> tuple[list[Any], list[Any]]:
    """Steps and scales of the tensors and constants that a call computes with."""
    tensors = [(each, grid.scale) for each, grid in zip(steps, grids, strict=True)]
    first, second = zip(*operands(call, tensors, _constant), strict=True)
    return list(first), list(second)


def _constant(values: np.ndarray) -> tuple[Any, Any]:
    steps, scale, _ = constant(values)
    return tf.constant(steps), tf.constant(scale, tf.float64)


def _mean(call: Call, steps: list[Any], grids: list[Grid], output: Grid) -> Any:
    """The sum of the codes, zero point included, times a factor, in float32."""
    (x,), (grid,) = steps, grids
    means = compute(call, [x])
    sizes = (tf.cast(tf.size(each), tf.float32) for each in (x, means))
    count = next(sizes) / tf.maximum(next(sizes), 1.0)
    sums = tf.round(means * count)
    # Single numbers in float64: graph optimization turns around operations in float32.
    of_all = tf.cast(count, tf.float64)
    factor = single(ratio_of(grid.scale, over=output.scale) * single(1 / of_all))
    of_zero = of_all * grid.zero_point
    offset = single(output.zero_point - single(of_zero * factor))
    factor, of_zero, offset, zero_point = (
        tf.cast(each, tf.float32) for each in (factor, of_zero, offset, output.zero_point)
    )
    return tf.round((sums + of_zero) * factor + offset) - zero_point


def _matrix_product(call: Call, steps: list[Any], grids: list[Grid], output: Grid) -> Any:
    ratio = ratio_of(grids[0].scale, grids[1].scale, over=output.scale)
    return _times(tf.round(compute(call, steps)), ratio)


def _softmax(call: Call, steps: list[Any], grids: list[Grid], output: Grid) -> Any:
    """Exponentials in float32, from a table, added up one after another."""
    axis = axis_of(call)
    (x,), (grid,) = steps, grids
    places = -grid.scale * tf.range(256, dtype=tf.float64)
    table = tf.cast(tf.exp(single(places)), tf.float32)
    below = tf.reduce_max(x, axis, keepdims=True) - x
    found = tf.gather(table, tf.cast(below, tf.int32))
    last = tf.constant([-1])
    total = tf.gather(tf.cumsum(found, axis), tf.shape(found)[axis] + last, axis=axis)
    return tf.floor(found * (1.0 / (total * tf.cast(output.scale, tf.float32))) + 0.5)


def _unit_norm(call: Call, steps: list[Any], grids: list[Grid], output: Grid) -> Any:
    """Along the last axis, in 128ths; XNNPACK leaves it to TFLite's kernel. The scale is lost."""
    x = tf.cast(steps[0], tf.int64)
    multiplier, exponent = inverse_square_root(tf.reduce_sum(x * x, -1, keepdims=True))
    return tf.cast(multiply(x, (multiplier, exponent + 7)), tf.float32)


Table = Callable[..., Any]
"""From all 256 steps of an input, its grid, its output's and options to steps of the output."""


def _by_table(function: Table, options: Callable[[Call], tuple[Any, ...]] = lambda call: ()) -> Any:
    """A function of one code: computed for all 256 of them, then looked up."""

    @traced_once
    def table(grid: Grid, output: Grid, *options: Any) -> Any:
        steps = tf.range(256, dtype=tf.float64) + grid.lowest
        return tf.cast(function(steps, grid, output, *options), tf.float32)

    def look_up(call: Call, steps: list[Any], grids: list[Grid], output: Grid) -> Any:
        (x,), (grid,) = steps, grids
        places = tf.cast(x - tf.cast(grid.lowest, tf.float32), tf.int32)
        return tf.gather(table(grid, output, *options(call)), places)

    return look_up


def _nearest_code(scaled: Any, zero_point: Any) -> Any:
    return tf.round(single(scaled + zero_point)) - zero_point


def _nearest_step(scaled: Any, zero_point: Any) -> Any:
    return round_away(scaled)


def _code_away(scaled: Any, zero_point: Any) -> Any:
    return round_away(single(scaled + zero_point)) - zero_point


def _of_real(
    function: Callable[..., Any], rounded: Callable[[Any, Any], Any] = _nearest_code
) -> Table:
    """A real function, computed in float32, then `rounded` to steps."""

    def table(steps: Any, grid: Grid, output: Grid, *options: Any) -> Any:
        values = single(function(single(steps * grid.scale), *options))
        return rounded(single(values * single(1.0 / output.scale)), output.zero_point)

    return table


def _directly(function: Callable[[Any], Any]) -> Kernel:
    """A real function with a fixed output range: `_of_real`, a third of the time.

    Computed for each number instead of looked up, if no code of the table lies so near a half
    that the last bits of float32 count.
    """
    real = _by_table(_of_real(function))

    @traced_once
    def is_clear(lowest: Any, scale: Any, output: Any) -> Any:
        numbers = (tf.range(256, dtype=tf.float64) + lowest) * scale
        scaled = function(numbers) / output
        return tf.reduce_all(tf.abs(scaled - tf.floor(scaled) - 0.5) > 1e-4)

    def kernel(call: Call, steps: list[Any], grids: list[Grid], output: Grid) -> Any:
        (x,), (grid,) = steps, grids

        def direct() -> Any:
            values = function(x * tf.cast(grid.scale, tf.float32))
            return tf.round(values * tf.cast(1 / output.scale, tf.float32))

        clear = is_clear(grid.lowest, grid.scale, output.scale)
        return tf.cond(clear, direct, lambda: real(call, steps, grids, output))

    return kernel


def _gelu(x: Any, approximate: bool) -> Any:
    """In the order of operations of TFLite's float32 kernel."""
    if approximate:
        cube = single(single(single(single(0.044715 * x) * x) * x))
        inner = single(math.sqrt(2 / math.pi) * single(x + cube))
        return single(0.5 * x) * single(1.0 + single(tf.tanh(inner)))
    scaled = single(x * np.float64(np.float32(-math.sqrt(0.5))))
    return single(0.5 * x) * single(tf.math.erfc(scaled))


def _elu(x: Any) -> Any:
    return tf.where(x < 0, single(tf.exp(x)) - 1.0, x)


def _relu(steps: Any, grid: Grid, output: Grid) -> Any:
    """A ReLU by itself."""
    number = fixed_point(ratio_of(grid.scale, over=output.scale))
    return tf.nn.relu(multiply(tf.cast(steps, tf.int64), number))


def _hard_swish(steps: Any, grid: Grid, output: Grid) -> Any:
    """x * relu6(x + 3) / 6 in 16 bits; XNNPACK leaves it to TFLite's kernel."""
    fine = grid.scale / 128.0
    value = shift(tf.cast(steps, tf.int64), 7)
    factor, exponent = upper_bits(fixed_point(single(fine / output.scale)))
    scaled = _high_product_16(value, factor)
    # The gate relu6(x + 3) / 6: from -1 to 1 at first, in 32768ths.
    gate_ratio = single(fine / np.float64(np.float32(3 / 32768)))
    gate_factor, gate_exponent = upper_bits(fixed_point(gate_ratio))
    gate = _saturate_16(shift(value, tf.maximum(gate_exponent - 1, 0)))
    gate = _high_product_16(gate, gate_factor)
    gate = tf.where(gate_exponent > 0, _saturate_16(shift(gate, 1)), gate)
    gate = shift_back(divide(gate, tf.maximum(-gate_exponent, 0)) + 2**15, 1)
    product = gate * scaled
    product = tf.sign(product) * shift_back(tf.abs(product), 15)
    return divide(product, tf.maximum(-exponent, 0))


def _high_product_16(a: Any, b: Any) -> Any:
    """Twice the upper half of a product of two 16-bit integers, rounded."""
    return shift_back(a * b + 2**14, 15)


def _saturate_16(x: Any) -> Any:
    return tf.clip_by_value(x, tf.constant(-(2**15), tf.int64), tf.constant(2**15 - 1, tf.int64))


def _leaky_relu(steps: Any, grid: Grid, output: Grid, slope: Any) -> Any:
    """XNNPACK's: both slopes are whole numbers of 256ths; halves go up.

    Slopes that it does not take are rounded to the nearest code.
    """
    slope = tf.cast(slope, tf.float64)
    above = ratio_of(grid.scale, over=output.scale)
    below = single(above * slope)
    taken = (above >= 2**-8) & (above <= 2**7)
    taken &= (tf.abs(below) >= 2**-8) & (tf.abs(below) <= 2**7)
    ratio = tf.where(steps >= 0, above, below)
    coarse = tf.floor((steps * tf.round(256.0 * ratio) + 128) / 256)
    return tf.where(taken, coarse, tf.round(steps * ratio))


def _prelu(call: Call, steps: list[Any], grids: list[Grid], output: Grid) -> Any:
    """The slopes are held in int8 too, in steps of the largest; XNNPACK leaves it to TFLite's."""
    alpha = tf.cast(call.layer.alpha, tf.float64)
    scale = tf.reduce_max(tf.abs(alpha)) / 127.0
    scale = tf.where(scale > 0, scale, tf.ones_like(scale))
    slopes = tf.cast(round_away(alpha / scale), tf.int64)
    x = tf.cast(steps[0], tf.int64)
    ratio = ratio_of(grids[0].scale, single(scale), over=output.scale)
    below = multiply(x * slopes, fixed_point(ratio))
    above = multiply(x, fixed_point(ratio_of(grids[0].scale, over=output.scale)))
    return tf.cast(tf.where(x >= 0, above, below), tf.float32)


def _resize(call: Call, steps: list[Any], grids: list[Grid], output: Grid) -> Any:
    """XNNPACK's bilinear interpolation: weights are whole numbers of 2048ths; halves go up."""
    zero_point = tf.cast(output.zero_point, tf.int64)
    sums = interpolated(call, tf.cast(steps[0], tf.int64) + zero_point, _neighbours, 11)
    return tf.cast(shift_back(sums + 2**21, 22) - zero_point, tf.float32)


def _neighbours(old: Any, new: Any) -> tuple[Any, Any, Any]:
    """For each pixel of a resized axis the two next to it, and the second's share in 2048ths."""
    scale = tf.cast(old, tf.float32) / tf.cast(new, tf.float32)
    place = tf.cast(tf.range(new), tf.float32) * scale + (0.5 * scale - 0.5)
    place = tf.clip_by_value(place, 0.0, tf.cast(old - 1, tf.float32))
    low = tf.floor(place)
    share = tf.cast(tf.round((place - low) * 2.0**11), tf.int64)
    low = tf.cast(low, tf.int32)
    return low, tf.minimum(low + 1, old - 1), share


INT8_KERNELS: dict[str, Kernel] = {
    "add": _add,
    "subtract": functools.partial(_add, sign=-1),
    "multiply": _product,
    "product": _matrix_product,
    "mean": _mean,
    "softmax": _softmax,
    "sigmoid": _directly(tf.sigmoid),
    "tanh": _directly(tf.tanh),
    "gelu": _by_table(
        _of_real(_gelu, _nearest_step), lambda call: (argument(call, "approximate", 1, False),)
    ),
    "elu": _by_table(_of_real(_elu, _code_away)),
    "unit_norm": _unit_norm,
    "relu": _by_table(_relu),
    "relu6": _by_table(_relu),
    "relu_n": _by_table(_relu),
    "hard_swish": _by_table(_hard_swish),
    "leaky_relu": _by_table(_leaky_relu, lambda call: (-compute(call, [tf.constant([-1.0])])[0],)),
    "prelu": _prelu,
    "resize": _resize,
}
"""Kind of a call, as in `kinds.kind_of` -> its kernel."""
