"""Ranges of inputs in which no usual number lies halfway between two quantized values."""

from __future__ import annotations

from typing import Any

import numpy as np

WIDER = 1 / 1019
"""Share by which an input's range is wider than its data.

Of 8 bits it then has 255 / (1 + 1 / 1019) = 1019 / 4 steps. As 1019 is a prime, the k-th of n equal
parts of the data's range, 1019 k / (4 n) steps, is no whole number and a half, for any n below
1019, any power of 2 and any power of 10. It comes no nearer than 1 / (4 n) steps.
"""

TRIES = 10
"""Multiples of `WIDER` that are tried: a range gets at most 1 % wider."""

REPEATED = 0.9
"""Share of different values above which they are on no grid: some lie next to ties anyway."""

ENOUGH = 2e-4
"""Distance to a tie, in steps, that is far enough: float32 gives 255 steps to 3e-5."""


def find_share_off_ties(low: float, high: float, values: np.ndarray, bits: int) -> float:
    """Returns the share by which a range has to be wider, for its values to be far from ties.

    The first multiple of `WIDER` that suffices, or the best one, for values on a grid, which repeat
    themselves. The range may have any ends, as those of pixels from which a mean was subtracted.

    Args:
        low, high: the ends of the range, zero included.
        values: numbers that are quantized in it.
        bits: its quantized values have 2 to 8 bits.
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


def widen_range(low: Any, high: Any, share: float = WIDER) -> Any:
    """Returns the upper end of a range that is wider by a share of its width."""
    return high + (high - low) * share
