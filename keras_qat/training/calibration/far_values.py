"""Values far outside of all others of a tensor, which take its range for themselves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FAR = 32
"""A range is taken by far values if it is more than so many times as wide as all others need."""
LEVELS = 8
"""Quantized values that are enough for all others."""
VARIED = 4
"""Different values that the others have at least: marks beside zeros cost nothing."""
MARK = 0.01
"""Share of a tensor's values that is no outlier, but a mark, as for masked entries."""


class FarValues(NamedTuple):
    """Values that are far outside of all others.

    Args:
        value: the outermost of them.
        share: share of the values that are far outside.
        low, high: the ends of the other values.
    """

    value: float
    share: float
    low: float
    high: float


def far_values(
    values: np.ndarray, extremes: tuple[float, float], ends: tuple[float, float], bits: int
) -> FarValues | None:
    """Finds what sets a tensor's range alone, so that few quantized values are left for the rest.

    Args:
        values: a sample of the tensor.
        extremes: its smallest and largest value, which may be missing in the sample.
        ends: its range.
        bits: bits of its quantized values.

    Returns:
        What lies far outside; None if nothing does.
    """
    low, high = ends
    rest = np.sort(np.clip(np.append(values.astype(np.float64).ravel(), extremes), low, high))
    outermost = None
    for _ in range(2):  # There may be some on both sides.
        gaps = np.diff(rest)
        if not gaps.size or gaps.max() <= (rest[-1] - rest[0]) / 4:
            break
        below, above = np.split(rest, [int(gaps.argmax()) + 1])
        if abs(below[-1]) < abs(above[0]):
            rest, far = below, above[-1]
        else:
            rest, far = above, below[0]
        outermost = max(outermost or 0.0, float(far), key=abs)
    if outermost is None or abs(outermost) < abs(high if outermost > 0 else low) / 2:
        return None  # None are far, or something else set the range, as an operator does.
    needed = max(rest[-1], 0.0) - min(rest[0], 0.0)
    share = 1 - rest.size / (values.size + 2)
    is_lost = needed * FAR < high - low and needed * (2**bits - 1) < LEVELS * (high - low)
    is_gate = abs(outermost) <= 1 and share >= MARK  # A saturated sigmoid, as in 1 - z.
    if not is_lost or is_gate or len(np.unique(rest)) < VARIED:
        return None
    return FarValues(outermost, share, float(rest[0]), float(rest[-1]))


def described(far: FarValues, low: float, high: float, bits: int) -> str:
    """Says in two sentences what far values do to a tensor, "it", and what helps."""
    cost = f"its range, {low:.4g} to {high:.4g}, is set by {far.value:.4g}, far outside of its"
    cost = f"{cost} {_others(far, low, high, bits)}"
    if far.share < MARK:
        return (
            f"{cost} Leave such outliers out of the data, or call calibrate with "
            f"method='percentile'."
        )
    near = 2 * (min(far.low, 0.0) if far.value < 0 else max(far.high, 0.0)) or np.sign(far.value)
    return f"{cost} Let the model use a number of their size in its place, such as {near:.2g}."


def _others(far: FarValues, low: float, high: float, bits: int) -> str:
    needed = max(far.high, 0.0) - min(far.low, 0.0)
    remaining_steps = max(1, int(needed / (high - low) * (2**bits - 1)))
    return (
        f"other values, {far.low:.4g} to {far.high:.4g}, which share {remaining_steps} of "
        f"{2**bits} quantized values."
    )
