"""Quantization parameters, and ranges of inputs that avoid rounding ties.

A tie is a value exactly halfway between two quantized values. Runtimes round ties differently.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import trace_once
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.plain_operations import Scalar, quotient

S = TypeVar("S", float, tf.Tensor)


@dataclasses.dataclass(frozen=True)
class QuantParams:
    """Quantization parameters: q represents the float value `scale * (q - zero_point)`.

    Args:
        scale: the size of one step (LSB): a float32 number, or a float64 scalar tensor if it is
            computed in a graph from a model's current range.
        zero_point: the quantized value that represents 0, an integer or a float64 scalar tensor.
        bits: 2 to 8 for int8, 16 for int16, or 32 for int32, such as the sums of a convolution.
            With fewer than 8 bits, only the lowest 2^bits values of int8 are used.
    """

    scale: Any
    zero_point: Any
    bits: int = 8

    @classmethod
    def from_range(cls, minimum: Scalar, maximum: Scalar, bits: int = 8) -> QuantParams:
        """Returns the parameters for a range that contains zero.

        The range is nudged (shifted slightly): a quantized value must represent exactly 0. If
        `minimum` and `maximum` are both 0, the scale is 1.

        Args:
            minimum, maximum: floats or scalar tensors. The result has tensors if the values are
                unknown while a graph is traced.
            bits: 2 to 8, or 16 for a symmetric range with the zero point 0.
        """
        given, eager = (minimum, maximum), tf.__internal__.EagerTensor
        known = [None if isinstance(x, eager) else tf.get_static_value(x) for x in given]
        if any(end is None for end in known):
            scale, zero_point = _converter(bits)(minimum, maximum)
            return cls(scale, zero_point, bits)
        with tf.init_scope():  # Compute eagerly, even while a graph is traced.
            ends = (tf.constant(end, tf.float32) for end in known)
            scale, zero_point = _converter(bits)(*ends)
            return cls(np.float32(scale.numpy()), int(zero_point.numpy()), bits)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the quantized values: int8, int16 or int32."""
        return np.dtype(f"int{max(self.bits, 8)}")

    @property
    def lowest(self) -> int:
        return int(np.iinfo(self.dtype).min)

    @property
    def highest(self) -> int:
        """The highest quantized value. For example, 4 bits use the values -128 to -113."""
        return self.lowest + 2**self.bits - 1

    @property
    def range(self) -> tuple[float, float]:
        """The float values of the lowest and the highest quantized value."""
        low, high = self.dequantize(np.array([self.lowest, self.highest]))
        return float(low), float(high)

    def as_tensors(self) -> QuantParams:
        """Converts scale and zero point to float64 scalar tensors."""
        if tf.is_tensor(self.scale) and tf.is_tensor(self.zero_point):
            return self
        scale, zero_point = (
            tf.convert_to_tensor(value)
            if tf.is_tensor(value)
            else tf.constant(float(value), tf.float64)
            for value in (self.scale, self.zero_point)
        )
        return dataclasses.replace(self, scale=scale, zero_point=zero_point)

    def dequantize(self, quantized: np.ndarray) -> np.ndarray:
        return (quantized.astype(np.float32) - np.float32(self.zero_point)) * self.scale

    def quantize(self, values: np.ndarray) -> np.ndarray:
        """Quantizes float values, as an application does for a file's inputs. Rounds halves up."""
        precise: Any = np.float64 if self.bits == 16 else np.float32
        scaled = np.floor(np.asarray(values, precise) / precise(self.scale) + precise(0.5))
        return np.clip(scaled + self.zero_point, self.lowest, self.highest).astype(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype.name} x {float(self.scale):.6g}, zero point {int(self.zero_point)}"


@functools.cache
def _converter(bits: int) -> Callable[[Scalar, Scalar], tuple[tf.Tensor, tf.Tensor]]:

    @partial(trace_once, signature=[tf.TensorSpec([]), tf.TensorSpec([])])
    def scale_and_zero_point(minimum: Scalar, maximum: Scalar) -> tuple[tf.Tensor, tf.Tensor]:
        levels = 2.0**bits - 1
        low, high = (tf.cast(end, tf.float64) for end in (minimum, maximum))
        scale = quotient(high - low, levels)
        scale = tf.where(scale > 0, scale, tf.ones_like(scale))
        if bits == 16:
            return single(scale), tf.zeros([], tf.float64)
        # Use float32 and round halves up, as in training. Zero must have the same level.
        below = tf.math.divide_no_nan(-low, single(quotient(single(high - low), levels)))
        below = tf.clip_by_value(tf.floor(single(below) + 0.5), 0.0, levels)
        if bits == 8:
            scale = quotient(single((levels - below) * scale) - single(-below * scale), levels)
        else:  # The range in the file has 256 levels. Only the lower levels are used.
            scale = quotient(single((255.0 - below) * scale) - single(-below * scale), 255.0)
        return single(scale), below - 128.0

    return scale_and_zero_point


def single(x: Scalar) -> tf.Tensor:
    """Rounds float64 values to float32 precision, and returns float64."""
    return tf.cast(tf.cast(x, tf.float32), tf.float64)


def ratio(family: KernelFamily, *factors: Scalar, by: Scalar) -> tf.Tensor:
    """Computes the product of `factors`, divided by `by`, with the float precision of a runtime.

    Kernels need for example `input_scale * weight_scale / output_scale`.
    """
    step = (lambda x: x) if family.ratios == "float64" else single
    return step(quotient(functools.reduce(lambda x, y: step(x * y), factors), by))


def round_half_away(x: tf.Tensor) -> tf.Tensor:
    return tf.sign(x) * tf.floor(tf.abs(x) + 0.5)


WIDER = 1 / 1019
"""The range of an input grows by this share of its width, to avoid rounding ties.

Data often has n equal steps, for example pixels with n = 255. With 8 bits, the widened range has
255 steps, and the data covers 255 / (1 + 1 / 1019) = 1019 / 4 of them. The k-th value of the data
lies at the step 1019 k / (4 n). Because 1019 is a prime, this is no half step if n is below 1019.
"""

TRIES = 10
"""`find_share_off_ties` tries this many multiples of `WIDER`, which is up to 1 % of the range."""

REPEATED = 0.9
"""Data with a larger share of distinct values than this is noise, and has no equal steps."""

ENOUGH = 2e-4
"""Sufficient distance of a value from a tie, in steps. Float32 rounding moves it by up to 3e-5."""


def find_share_off_ties(low: float, high: float, values: np.ndarray, bits: int) -> float:
    """Returns by how much to widen a range, as a share of its width, to avoid rounding ties.

    The result is the smallest multiple of `WIDER` that keeps all values away from ties. If none of
    `TRIES` multiples does, it is the one with the largest distance from ties. For data without
    equal steps, such as noise, it is `WIDER`.

    Args:
        low, high: the ends of the range, which includes zero.
        values: the data to quantize, such as calibration data of an input.
        bits: 2 to 8.
    """
    values = values[(values >= low) & (values <= high)]
    inside = np.unique(values).astype(np.float64)
    best, nearest = WIDER, 0.0
    if not inside.size or low == high or inside.size > REPEATED * values.size:
        return best
    for share in WIDER * np.arange(1, TRIES + 1):
        steps = inside * (2**bits - 1) / ((high - low) * (1 + share))
        distance = float(np.min(np.abs(steps - np.floor(steps) - 0.5)))
        if distance > nearest:
            best, nearest = float(share), distance
        if nearest > ENOUGH:
            break
    return best


def widen_range(low: S, high: S, share: float = WIDER) -> S:
    """Returns a new upper end for a range: its width grows by `share`. The lower end stays."""
    return high + (high - low) * share
