"""Ranges as exported functions have them: numbers, and what follows from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat import fake_quant
from keras_qat.keras2.graph import Call
from keras_qat.kinds import FIXED_RANGES, kind_of

__all__ = ["Levels", "implied_levels"]


@dataclasses.dataclass(frozen=True)
class Levels:
    """A range as the exported function has it: constants."""

    minimum: float
    maximum: float
    bits: int = 8

    @classmethod
    def of(cls, quantizer: Any) -> Levels:
        """The levels of a trained quantizer."""
        minimum, maximum = quantizer.current_range()
        return cls(minimum, maximum, quantizer.spec.bits)

    @classmethod
    def around(cls, levels: list[Levels]) -> Levels:
        """Levels for tensors that are joined: theirs, or 256 levels over all of their ranges."""
        if len(set(levels)) == 1:
            return levels[0]
        ends = min(each.minimum for each in levels), max(each.maximum for each in levels)
        return cls(*ends, bits=max(8, *(each.bits for each in levels)))

    def round(self, x: Any) -> Any:
        """Fake quantization as the converter reads it: in 256 levels, if they are no more.

        With fewer bits the tensor keeps its own step width, holds the lower codes only, and is
        clipped at the highest of them.
        """
        scale, zero_point = fake_quant.scale_of(self.minimum, self.maximum, self.bits)
        low = -zero_point * scale
        bits = max(self.bits, 8)

        def to_levels(x: Any) -> Any:
            high = low + (2**bits - 1) * scale
            return tf.quantization.fake_quant_with_min_max_args(x, low, high, bits)

        if self.bits >= 8:
            return to_levels(x)
        high = np.float32(low + (2**self.bits - 1) * scale)
        return to_levels(tf.minimum(to_levels(x), high))


def implied_levels(call: Call, known: list[Levels]) -> Levels | None:
    """The levels of a call's output that follow from those of all of its inputs."""
    kind = kind_of(call)
    if kind is None or not known:
        return None
    if kind in ("move", "linear"):
        return known[0]
    if kind in FIXED_RANGES:
        return Levels(*FIXED_RANGES[kind])
    if kind in ("average_pooling", "mean", "concatenate"):
        return Levels.around(known)
    return None
