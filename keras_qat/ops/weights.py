"""The quantized weights of a node."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.io.inputs import split_rows


def map_rows(compute: Callable[[Any], Any], table: Any) -> Any:
    """Applies a function to a table in blocks of rows. For large tables, this saves memory."""
    if tf.is_tensor(table) and not tf.executing_eagerly():
        return compute(table)
    values, result = np.asarray(table), np.zeros(0)
    for rows in split_rows(values):
        block = np.asarray(compute(values[rows]))
        if not rows.start:
            result = np.empty((len(values), *block.shape[1:]), block.dtype)
        result[rows] = block
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """The quantized weights of a node, with a folded BatchNormalization.

    Values are NumPy arrays when a file is written, and tensors inside a `tf.function`.

    Args:
        name: the layer's attribute that holds the weight, such as "kernel". "" for an affine
            operator.
        q: the quantized values, -127 to 127, in the layer's shape. An affine operator has a value
            for each channel. Recurrent operators replace it by None after preparation.
        scale: the scales in float64, rounded to float32. The shape broadcasts against `q`.
        bias: an integer for each output channel, or None. The unit is input scale x weight scale.
        bits: bits that the weights were trained with, 2 to 8.
        reach: the result of `compute_reach`, or None if unknown. A sum of products is at most
            `reach` times the largest input.
        rounding: the largest change of a weight by conversion to a symmetric range, in quantization
            steps of training. Kernels require symmetric ranges, but training may use asymmetric
            ranges.
        packed: whether files store the weights in 4 bits, two in a byte.
        divisor: `q / divisor` fits in 4 bits, because weights of few bits are scaled up to 8 bits.
            A number, or one for each channel. None if there is no such factor.
        gates: the number of gates with a scale, 4 in an LSTM. 0 in other layers.
        inner: the quantization parameters of tensors inside a recurrent operator, by name.
        recurrent: the weights that a recurrent operator multiplies by its previous output.
    """

    name: str
    q: Any
    scale: Any
    bias: Any = None
    bits: int = 8
    reach: Any = None
    rounding: float = 0.0
    packed: bool = False
    divisor: Any = None
    gates: int = 0
    inner: Mapping[str, QuantParams] = dataclasses.field(default_factory=dict)
    recurrent: Weights | None = None

    @property
    def count(self) -> int:
        """The number of weights, including `recurrent`, without biases."""
        more = 0 if self.recurrent is None else self.recurrent.count
        return int(np.prod(self.q.shape)) + more

    @property
    def per_channel(self) -> bool:
        """Whether each output channel has its own scale."""
        return int(np.prod(self.scale.shape)) > 1

    @property
    def granularity(self) -> str:
        """The granularity of the scales: "per gate", "per channel" or "per tensor"."""
        return "per gate" if self.gates else "per channel" if self.per_channel else "per tensor"

    def __str__(self) -> str:
        return f"weights {list(self.q.shape)} of {self.bits} bits {self.granularity}" + (
            "" if self.bias is None else ", bias"
        )


def count_terms(shape: tuple[int, ...], channels: tuple[int, ...]) -> int:
    """Returns the number of products that are summed for one output value.

    `channels` are the axes of the output channels in the weights' shape, counted from the end.
    """
    return math.prod(shape) // max(1, math.prod(shape[axis] for axis in channels))


def compute_reach(q: np.ndarray | tf.Tensor, channels: tuple[int, ...]) -> float | tf.Tensor:
    """Sums the positive and the negative weights of each channel. Returns the largest absolute sum.

    For `channels`, see `count_terms`.
    """
    axes = tuple(axis for axis in range(-len(q.shape), 0) if axis not in channels)
    if isinstance(q, np.ndarray):
        size, total = np.abs(q).sum(axes, np.float64), q.sum(axes, np.float64)
        return float(np.max(size + np.abs(total), initial=0)) / 2
    q = tf.cast(q, tf.float32)  # Float32 represents these integers exactly.
    if channels == tuple(range(-len(channels), 0)):  # A product is much faster than a reduction.
        columns = tf.reshape(q, [count_terms(q.shape, channels), -1])
        ones = tf.ones([1, columns.shape[0]])
        size, total = tf.matmul(ones, tf.abs(columns)), tf.matmul(ones, columns)
    else:
        size, total = tf.reduce_sum(tf.abs(q), axes), tf.reduce_sum(q, axes)
    return tf.cast(tf.reduce_max(size + tf.abs(total)), tf.float64) / 2
