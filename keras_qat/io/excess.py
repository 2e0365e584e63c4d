"""Finds data that do not fit the range of an input, as pixels of 0 to 255 where it is 0 to 1."""

from __future__ import annotations

from typing import Any

import numpy as np

SLIGHT = 0.1
"""Part of a range's width by which any value may lie beyond it."""
BEYOND = 0.25
"""Share of an input's values that may lie farther beyond: of another scale, most of them do."""
FAR = 0.01
"""Share of an example's values that may lie farther from the range than it is wide."""


def describe_excess(name: str, x: np.ndarray, low: float, high: float) -> str:
    """Returns a sentence if data do not fit the range of an input, else "".

    They do not if more than `BEYOND` of all values lie beyond the range by more than `SLIGHT`, or
    if in most examples more than `FAR` of the values lie farther from it than it is wide. Single
    outliers fit, and so do data that are a little larger.

    Args:
        name: the input's name.
        x: some examples.
        low: the smallest value that the input can hold.
        high: the largest one.
    """
    width = high - low
    if not width > 0 or not x.size:
        return ""
    lowest, highest = float(np.nanmin(x)), float(np.nanmax(x))
    slight = SLIGHT * width
    if low - slight <= lowest and highest <= high + slight:
        return ""
    share = np.mean((x < low - slight) | (x > high + slight))
    far = (x < low - width) | (x > high + width)
    in_most = np.median(far.reshape(len(x), -1).mean(1)) > FAR
    if share <= BEYOND and not in_most:
        return ""
    return (
        f"{share:.0%} of the values of input '{name}' are outside its range of {low:.3g} to "
        f"{high:.3g} and are clipped: the data is {lowest:.4g} to {highest:.4g}. Scale it as in "
        f"training, or calibrate on more data."
    )


def get_range(dtype: Any, scale: float, zero_point: int) -> tuple[float, float]:
    """Returns the smallest and the largest value that quantized values of a type stand for."""
    limits = np.iinfo(dtype)
    return (limits.min - zero_point) * scale, (limits.max - zero_point) * scale


def get_pixel_range(scale: Any, offset: Any) -> tuple[float, float]:
    """Returns the smallest and the largest value of an input that is `scale * pixel + offset`."""
    ends = np.asarray(offset) + np.multiply.outer([0.0, 255.0], scale)
    return float(ends.min()), float(ends.max())
