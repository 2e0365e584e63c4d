"""Convolutions and matrix products: a sum of products of integers, a bias, one multiplication."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.export.folded import INT8_MAX, Folded
from keras_qat.export.spelling import as_keras
from keras_qat.keras2.backend import keras
from keras_qat.simulate.arithmetic import fixed_point, multiply, multiply_sums, requantize
from keras_qat.simulate.codes import Codes, Grid, round_away

__all__ = ["Weights", "convolve"]


@dataclasses.dataclass(frozen=True)
class Weights:
    """A layer's kernel and bias as the file holds them.

    Args:
        folded: the kernel with its codes (-127 to 127, in float64) in place of its values, and
            zeros for a bias.
        scales: float64, one for each output channel, or a single one.
        bias: the bias in real numbers, or None.
    """

    folded: Folded
    scales: np.ndarray
    bias: np.ndarray | None

    @classmethod
    def of(cls, folded: Folded) -> Weights:
        """The weights of a folded layer with a quantized kernel."""
        assert folded.limits is not None
        # The converter reads the limits as float32 and divides in double precision.
        scales = folded.limits.astype(np.float64) / INT8_MAX
        codes = np.rint(folded.kernel / scales)
        zeros = None if folded.bias is None else np.zeros_like(folded.bias)
        bare = dataclasses.replace(folded, kernel=codes, bias=zeros)
        return cls(bare, scales.reshape(-1), folded.bias)

    def entries(self, indices: np.ndarray) -> Codes:
        """Rows of an embedding's table, which hold its own steps."""
        (scale,) = self.scales.astype(np.float32)
        return Codes(self.folded.kernel[indices.astype(np.int64)].astype(np.int8), Grid(scale, 0))

    def bias_codes(self, grid: Grid) -> np.ndarray | int:
        """The bias in steps of input scale times weight scale."""
        if self.bias is None:
            return 0
        if self.folded.bias_codes is not None:
            return self.folded.bias_codes
        scales = self.scales.reshape(self.bias.shape) if self.scales.size > 1 else self.scales
        if grid.is_int16:  # As `export.int16` has it.
            products = grid.scale * scales.astype(np.float32)
            return np.round(self.bias / products.astype(np.float64)).astype(np.int64)
        steps = self.bias.astype(np.float64) / (np.float64(grid.scale) * scales)
        return round_away(steps).astype(np.int64)


def convolve(
    kernels: str, layer: Any, x: Codes, weights: Weights, output: Grid, any_batch: bool
) -> np.ndarray:
    """What a layer with a kernel computes, in codes of `output` that are not yet clipped.

    Args:
        kernels: the family of kernels.
        layer: the layer.
        x: its input.
        weights: its weights.
        output: the output's grid.
        any_batch: whether the file leaves the number of examples open.
    """
    sums = _sums(layer, x.steps, weights.folded) + weights.bias_codes(x.grid)
    scales = weights.scales.astype(np.float32)
    exact = np.float64(x.scale) * scales.astype(np.float64) / np.float64(output.scale)
    if x.grid.is_int16 and not _is_matrix_product(layer, weights.folded):
        codes = multiply_sums(sums, *fixed_point(exact))
    elif kernels == "xnnpack" and not x.grid.is_int16 and any_batch and type(layer) in TRANSPOSED:
        # XNNPACK takes only those whose output's shape is known. TFLite's optimized kernel
        # computes eight channels at a time, and those that are left as the reference kernel does.
        channels = np.arange(sums.shape[-1])
        in_eights = channels < channels.size // 8 * 8
        codes = multiply(sums, *fixed_point(exact), in_eights)
    elif kernels == "xnnpack" and not x.grid.is_int16:
        codes = requantize(kernels, sums, x.scale * scales / output.scale)
    elif _is_matrix_product(layer, weights.folded):
        # A FULLY_CONNECTED: the one kernel that multiplies in double precision.
        codes = round_away(sums * exact).astype(np.int64)
    else:
        codes = requantize(kernels, sums, exact)
    return codes + output.zero_point


def _is_matrix_product(layer: Any, bare: Folded) -> bool:
    """Whether a layer is a FULLY_CONNECTED in the file, as custom layers are; `Dense` is not."""
    if isinstance(layer, keras.layers.Dense):
        return False
    return isinstance(layer, keras.layers.EinsumDense) or bare.kernel.ndim == 2


TRANSPOSED = (keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose)


def _sums(layer: Any, steps: np.ndarray, bare: Folded) -> np.ndarray:
    """Sums of products of whole numbers, by the layer itself.

    Float32 adds whole numbers exactly below 2^24. Where sums can be larger, the numbers are taken
    apart: 16-bit steps into multiples of 256 and the rest, the kernel into multiples of 2, 4 or
    16 and the rest.
    """
    kernel = bare.kernel
    if np.abs(steps).max(initial=0) > 256:
        high = (steps + 128) >> 8
        return 256 * _sums(layer, high, bare) + _sums(layer, steps - 256 * high, bare)
    if not bare.name:  # An affine layer.
        return (steps * kernel.reshape(-1)).astype(np.int64)
    axes = tuple(range(kernel.ndim - 1))
    largest = np.abs(steps).max(initial=0) * np.abs(kernel).sum(axes).max(initial=0)
    bits = int(np.abs(kernel).max(initial=0)).bit_length()
    if largest < 2**24 or bits < 2:
        bare = dataclasses.replace(bare, kernel=kernel.astype(np.float32))
        return as_keras(layer, tf.constant(steps, tf.float32), bare).numpy().astype(np.int64)
    base = 2 ** ((bits + 1) // 2)
    high = np.rint(kernel / base)
    parts = (dataclasses.replace(bare, kernel=part) for part in (high, kernel - base * high))
    upper, lower = (_sums(layer, steps, part) for part in parts)
    return base * upper + lower
