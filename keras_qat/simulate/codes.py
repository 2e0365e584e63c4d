"""Integer tensors: codes with the scale and zero point that give them their meaning."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_qat import fake_quant

if TYPE_CHECKING:
    from keras_qat.export.levels import Levels

__all__ = ["Codes", "Grid", "from_values", "round_away"]

LOW, HIGH = -128, 127
"""Lowest and highest code of int8."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The real values that an int8 or int16 tensor can hold: `(code - zero_point) * scale`.

    Args:
        scale: width of a step, as the file holds it: a float32.
        zero_point: the code of zero.
        highest: the highest code that is used: 127, fewer with fewer than 8 bits, 32767 with 16.
    """

    scale: np.float32
    zero_point: int
    highest: int = HIGH

    @property
    def is_int16(self) -> bool:
        """Whether the codes are int16."""
        return self.highest > HIGH

    @property
    def limits(self) -> np.iinfo[Any]:
        """The codes' type and its ends."""
        return np.iinfo(np.int16 if self.is_int16 else np.int8)

    @classmethod
    def of(cls, levels: Levels) -> Grid:
        """The grid that TFLite's converter makes of levels in the exported function.

        It reads the ends of the range as float32 and divides in double precision.
        """
        scale, zero_point = fake_quant.scale_of(levels.minimum, levels.maximum, levels.bits)
        if levels.bits == 16:
            return cls(np.float32(scale), 0, np.iinfo(np.int16).max)
        low, high = np.float32(-zero_point * scale), np.float32((255 - zero_point) * scale)
        step = (np.float64(high) - np.float64(low)) / 255
        return cls(np.float32(step), zero_point + LOW, LOW + 2**levels.bits - 1)

    def code_of(self, value: float) -> int:
        """The code that kernels clip at where their result may not pass `value`."""
        limits = self.limits
        if np.isinf(value):
            return int(limits.min if value < 0 else limits.max)
        code = self.zero_point + int(round_away(np.float32(value) / self.scale))
        return int(min(max(code, limits.min), limits.max))


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """A quantized tensor.

    Args:
        codes: int8 or int16, of the tensor's shape.
        grid: what they stand for.
    """

    codes: np.ndarray
    grid: Grid

    @property
    def scale(self) -> np.float32:
        """Width of a step."""
        return self.grid.scale

    @property
    def zero_point(self) -> int:
        """The code of zero."""
        return self.grid.zero_point

    @property
    def steps(self) -> np.ndarray:
        """The distance of each code to the zero point, int32: the real value in steps."""
        return self.codes.astype(np.int32) - self.zero_point

    @property
    def values(self) -> np.ndarray:
        """The real values, float32."""
        return self.steps.astype(np.float32) * self.scale


def round_away(x: Any) -> Any:
    """Rounds to the nearest whole number, and halves away from zero, like C's `round`."""
    return np.copysign(np.floor(np.abs(x) + np.asarray(0.5, np.asarray(x).dtype)), x)


def from_values(values: Any, grid: Grid, kernels: str | None = None) -> Codes:
    """Real numbers as codes.

    Args:
        values: the numbers.
        grid: the grid.
        kernels: whose kernel quantizes. TFLite's divides by the scale and rounds halves away from
            zero; XNNPACK's multiplies by its inverse and rounds them to the even neighbour. None
            for an input that the caller quantizes, as `verify` does: halves up.
    """
    values = np.asarray(values, np.float32)
    if kernels == "xnnpack" and not grid.is_int16:
        steps = np.rint(values * (np.float32(1) / grid.scale))
    elif kernels is not None:
        steps = round_away(values / grid.scale)
    else:
        precise = np.float64 if grid.is_int16 else np.float32
        steps = np.floor(values.astype(precise) / precise(grid.scale) + precise(0.5))
    codes = np.clip(steps + grid.zero_point, grid.limits.min, grid.highest)
    return Codes(codes.astype(grid.limits.dtype), grid)
