"""Kernels that do not round to the nearest code, as the simulation has them at inference.

Most kernels give the code next to the real result, as fake quantization does. These give another
one for up to one code in ten. Training goes without: there it would cost time and teach nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.branching import straight_through
from keras_qat.fixed_point import divide, fixed_point, multiply, shift, shift_back

__all__ = ["ROUNDINGS", "Grid", "rounded"]

LOW, HIGH = -128, 127


class Grid(NamedTuple):
    """The codes of an int8 tensor: real value of one step, and the code of 0. Scalar tensors."""

    scale: Any
    zero_point: Any

    @classmethod
    def of(cls, minimum: Any, maximum: Any) -> Grid:
        """Those of an 8-bit range, nudged like `fake_quant.fake_quantize` does."""
        scale = (maximum - minimum) / 255.0
        safe = tf.where(scale > 0, scale, tf.ones_like(scale))
        zero_point = tf.clip_by_value(tf.round(-minimum / safe), 0.0, 255.0)
        return cls(safe, tf.cast(zero_point, tf.int64) + LOW)

    def codes(self, values: Any) -> Any:
        """The codes of values that lie on the grid."""
        return tf.cast(tf.round(values / self.scale), tf.int64) + self.zero_point

    def values(self, codes: Any) -> Any:
        """The values of codes, clipped first."""
        codes = tf.clip_by_value(codes, tf.constant(LOW, tf.int64), tf.constant(HIGH, tf.int64))
        return tf.cast(codes - self.zero_point, tf.float32) * self.scale


def rounded(kernel: str, layer: Any, source: Any, grid: Grid, output: Grid, x: Any) -> Any:
    """What a kernel gives in place of `x`.

    Args:
        kernel: its name in `ROUNDINGS`.
        layer: the layer that it computes, which may have a slope.
        source: its input, on the levels of `grid`.
        grid: the input's codes.
        output: the output's codes.
        x: the layer's result as the quantizer has rounded it.

    Returns:
        A tensor like `x`, with the gradient of `x`.
    """
    y = tf.stop_gradient(ROUNDINGS[kernel](layer, source, grid, output, tf.shape(x)))
    return straight_through(lambda x: tf.ensure_shape(y, x.shape), x)


def _by_table(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one code: computed for all 256 of them, then looked up."""

    def look_up(layer: Any, source: Any, grid: Grid, output: Grid, shape: Any) -> Any:
        steps = tf.range(LOW, HIGH + 1, dtype=tf.int64) - grid.zero_point
        table = output.values(function(layer, steps, grid, output) + output.zero_point)
        return tf.gather(table, grid.codes(source) - LOW)

    return look_up


def _hard_swish(layer: Any, steps: Any, grid: Grid, output: Grid) -> Any:
    """x * relu6(x + 3) / 6 in 16 bits; XNNPACK leaves it to TFLite's kernel."""
    fine = grid.scale / 128.0
    value = shift(steps, 7)
    factor, exponent = _fixed_point_16(fine / output.scale)
    scaled = _high_product_16(value, factor)
    # The gate relu6(x + 3) / 6: from -1 to 1 at first, in 32768ths.
    gate_factor, gate_exponent = _fixed_point_16(fine / np.float32(3 / 32768))
    gate = _saturate_16(shift(value, tf.maximum(gate_exponent - 1, 0)))
    gate = _high_product_16(gate, gate_factor)
    gate = tf.where(gate_exponent > 0, _saturate_16(shift(gate, 1)), gate)
    gate = shift_back(divide(gate, tf.maximum(-gate_exponent, 0)) + 2**15, 1)
    product = gate * scaled
    product = tf.sign(product) * shift_back(tf.abs(product), 15)
    return divide(product, tf.maximum(-exponent, 0))


def _fixed_point_16(number: Any) -> tuple[Any, Any]:
    """The same with a multiplier of 15 bits."""
    multiplier, exponent = fixed_point(number)
    return tf.minimum(shift_back(multiplier + 2**15, 16), 2**15 - 1), exponent


def _high_product_16(a: Any, b: Any) -> Any:
    """Twice the upper half of a product of two 16-bit integers, rounded."""
    return shift_back(a * b + 2**14, 15)


def _saturate_16(x: Any) -> Any:
    return tf.clip_by_value(x, tf.constant(-(2**15), tf.int64), tf.constant(2**15 - 1, tf.int64))


def _leaky_relu(layer: Any, steps: Any, grid: Grid, output: Grid) -> Any:
    """XNNPACK's: both slopes are whole numbers of 256ths; halves go up.

    Slopes that it does not take are rounded to the nearest code.
    """
    above = grid.scale / output.scale
    below = above * -tf.reshape(layer.call(tf.constant([-1.0])), [])
    taken = (above >= 2**-8) & (above <= 2**7)
    taken &= (tf.abs(below) >= 2**-8) & (tf.abs(below) <= 2**7)
    ratio = tf.where(steps >= 0, above, below)
    coarse = shift_back(steps * tf.cast(tf.round(256.0 * ratio), tf.int64) + 128, 8)
    exact = tf.cast(tf.round(tf.cast(steps, tf.float32) * ratio), tf.int64)
    return tf.where(taken, coarse, exact)


def _prelu(layer: Any, source: Any, grid: Grid, output: Grid, shape: Any) -> Any:
    """The slopes are held in int8 too, in steps of the largest; XNNPACK leaves it to TFLite's."""
    alpha = tf.convert_to_tensor(layer.alpha)
    scale = tf.reduce_max(tf.abs(alpha)) / 127.0
    scale = tf.where(scale > 0, scale, tf.ones_like(scale))
    slopes = tf.sign(alpha) * tf.floor(tf.abs(alpha) / scale + 0.5)
    steps = grid.codes(source) - grid.zero_point
    below = multiply(
        steps * tf.cast(slopes, tf.int64), fixed_point(grid.scale * scale / output.scale)
    )
    above = multiply(steps, fixed_point(grid.scale / output.scale))
    return output.values(tf.where(steps >= 0, above, below) + output.zero_point)


def _resize(layer: Any, source: Any, grid: Grid, output: Grid, shape: Any) -> Any:
    """XNNPACK's bilinear interpolation: weights are whole numbers of 2048ths; halves go up."""
    codes = grid.codes(source)
    for axis in (1, 2):
        low, high, share = _neighbours(tf.shape(source)[axis], shape[axis])
        share = tf.reshape(share, [-1 if each == axis else 1 for each in range(4)])
        first, second = tf.gather(codes, low, axis=axis), tf.gather(codes, high, axis=axis)
        codes = first * (2**11 - share) + second * share
    return output.values(shift_back(codes + 2**21, 22))


def _neighbours(old: Any, new: Any) -> tuple[Any, Any, Any]:
    """For each pixel of a resized axis the two next to it, and the second's share in 2048ths."""
    scale = tf.cast(old, tf.float32) / tf.cast(new, tf.float32)
    place = tf.cast(tf.range(new), tf.float32) * scale + (0.5 * scale - 0.5)
    place = tf.clip_by_value(place, 0.0, tf.cast(old - 1, tf.float32))
    low = tf.floor(place)
    share = tf.cast(tf.round((place - low) * 2.0**11), tf.int64)
    low = tf.cast(low, tf.int32)
    return low, tf.minimum(low + 1, old - 1), share


ROUNDINGS: dict[str, Callable[..., Any]] = {
    "hard_swish": _by_table(_hard_swish),
    "leaky_relu": _by_table(_leaky_relu),
    "prelu": _prelu,
    "resize": _resize,
}
"""Kind of a layer, as in `patterns.kind_of` -> what its kernel gives, from the layer, its input,
the codes of both and the result's shape."""
