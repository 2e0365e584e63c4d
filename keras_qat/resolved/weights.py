"""A layer's weights as integer kernels hold them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

__all__ = ["Weights"]


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """Quantized weights, BatchNormalization folded: arrays for files, tensors in a graph.

    Args:
        name: the attribute of the layer that holds the weight; "" for an affine operator.
        q: whole numbers, -127 to 127, in the layer's own shape; of an affine operator one for each
            channel.
        scale: real value of 1, float64 holding float32 numbers, shaped to broadcast against `q`.
        bias: whole numbers in units of input scale x weight scale, one for each output channel; or
            None.
        bits: 2 to 8: how many bits the weights were trained with.
        rounding: the largest change of a weight, in LSB of its training, because kernels have no
            zero point for weights: 0 but for wide asymmetric 8-bit ranges.
    """

    name: str
    q: Any
    scale: Any
    bias: Any = None
    bits: int = 8
    rounding: float = 0.0

    @property
    def per_channel(self) -> bool:
        """Whether each output channel has a scale of its own."""
        return int(np.prod(self.scale.shape)) > 1

    def __str__(self) -> str:
        kind = "per channel" if self.per_channel else "per tensor"
        return f"weights {list(self.q.shape)} of {self.bits} bits {kind}" + (
            "" if self.bias is None else ", bias"
        )
