"""Quantization parameters: what the quantized values of a tensor stand for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.as_written import quotient
from keras_qat.arithmetic.control_flow import trace_once
from keras_qat.arithmetic.kernel_families import KernelFamily


@dataclasses.dataclass(frozen=True)
class QuantParams:
    """The real values that a quantized tensor can hold: `scale * (q - zero_point)`.

    Numbers where a file is written or a simulation runs; float64 scalar tensors in a graph that
    reads the ranges of a model each time it runs.

    Args:
        scale: real value of one LSB: a float32 number, as files hold it.
        zero_point: the quantized value of 0.
        bits: 2 to 8, held in int8, or 16, held in int16; 32 inside of operators, in int32. With
            fewer than 8 bits the lowest 2^bits values of int8 are used.
    """

    scale: Any
    zero_point: Any
    bits: int = 8

    @classmethod
    def from_range(cls, minimum: Any, maximum: Any, bits: int = 8) -> QuantParams:
        """Returns the parameters of a range, nudged so that zero is a quantized value.

        As TFLite does, the nudged ends are float32 and are divided in double precision. The range
        must hold zero. An empty range gets the scale 1. With 16 bits, ranges are symmetric and the
        zero point is 0.

        Args:
            minimum, maximum: numbers or scalar tensors. Tensors that are known while a graph is
                traced count as numbers.
            bits: 2 to 8, or 16.
        """
        known = [None if _is_eager(end) else tf.get_static_value(end) for end in (minimum, maximum)]
        if any(end is None for end in known):
            scale, zero_point = _of_range(bits)(minimum, maximum)
            return cls(scale, zero_point, bits)
        with tf.init_scope():  # A known range, once and for all.
            ends = (tf.constant(end, tf.float32) for end in known)
            scale, zero_point = _of_range(bits)(*ends)
            return cls(np.float32(scale.numpy()), int(zero_point.numpy()), bits)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the quantized values: int8, int16 or int32."""
        return np.dtype(f"int{max(self.bits, 8)}")

    @property
    def lowest(self) -> int:
        """The lowest quantized value."""
        return int(np.iinfo(self.dtype).min)

    @property
    def highest(self) -> int:
        """The highest quantized value that is used."""
        return self.lowest + 2**self.bits - 1

    def as_tensors(self) -> QuantParams:
        """Returns the parameters with scale and zero point as float64 scalar tensors."""
        if tf.is_tensor(self.scale) and tf.is_tensor(self.zero_point):
            return self
        scale, zero_point = (
            tf.convert_to_tensor(number)
            if tf.is_tensor(number)
            else tf.constant(float(number), tf.float64)
            for number in (self.scale, self.zero_point)
        )
        return dataclasses.replace(self, scale=scale, zero_point=zero_point)

    def dequantize(self, quantized: np.ndarray) -> np.ndarray:
        """Returns the real values of quantized ones, in float32."""
        return (quantized.astype(np.float32) - np.float32(self.zero_point)) * self.scale

    def quantize(self, values: np.ndarray) -> np.ndarray:
        """Quantizes real values as callers of a file do: halves up, clipped."""
        precise: Any = np.float64 if self.bits == 16 else np.float32
        scaled = np.floor(np.asarray(values, precise) / precise(self.scale) + precise(0.5))
        return np.clip(scaled + self.zero_point, self.lowest, self.highest).astype(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype.name} x {float(self.scale):.6g}, zero point {int(self.zero_point)}"


def _is_eager(value: Any) -> bool:
    return isinstance(value, tf.__internal__.EagerTensor)


@functools.cache
def _of_range(bits: int) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns a function from the ends of a range to scale and zero point."""

    @partial(trace_once, signature=[tf.TensorSpec([]), tf.TensorSpec([])])
    def scale_and_zero_point(minimum: Any, maximum: Any) -> tuple[Any, Any]:
        levels = 2.0**bits - 1
        low, high = (tf.cast(end, tf.float64) for end in (minimum, maximum))
        scale = quotient(high - low, levels)
        scale = tf.where(scale > 0, scale, tf.ones_like(scale))
        if bits == 16:
            return single(scale), tf.zeros([], tf.float64)
        # In float32 and halves up, as training does, so that zero is the same level there.
        below = tf.math.divide_no_nan(-low, single(quotient(single(high - low), levels)))
        below = tf.clip_by_value(tf.floor(single(below) + 0.5), 0.0, levels)
        if bits == 8:
            scale = quotient(single((levels - below) * scale) - single(-below * scale), levels)
        else:  # The file's range has 256 levels, of which the lower ones are used.
            scale = quotient(single((255.0 - below) * scale) - single(-below * scale), 255.0)
        return single(scale), below - 128.0

    return scale_and_zero_point


def single(number: Any) -> Any:
    """Rounds a float64 number to float32, as a computation in float32 would."""
    return tf.cast(tf.cast(number, tf.float32), tf.float64)


def ratio(family: KernelFamily, *factors: Any, by: Any) -> Any:
    """Divides a product of scales: in float32, for TFLite Micro in double precision."""
    step = (lambda x: x) if family.ratios == "float64" else single
    return step(quotient(functools.reduce(lambda x, y: step(x * y), factors), by))


def round_half_away(x: Any) -> Any:
    """Rounds to whole numbers, half away from zero."""
    return tf.sign(x) * tf.floor(tf.abs(x) + 0.5)
