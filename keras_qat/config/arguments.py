"""What users give as ranges, checked before any work is done."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["range_of", "switch"]


def range_of(input_range: Any) -> tuple[float, float] | None:
    """The minimum and maximum of inputs, with zero in between, as quantized values have to stand.

    Raises:
        ValueError: if they are none.
    """
    if input_range is None:
        return None
    ends = np.asarray(input_range)
    is_range = ends.shape == (2,) and ends.dtype.kind in "iuf" and np.isfinite(ends).all()
    if not is_range or not ends[0] < ends[1]:
        raise ValueError(
            f"input_range={input_range!r}: give the minimum and the maximum of the inputs, for "
            f"example (0.0, 1.0)."
        )
    return min(float(ends[0]), 0.0), max(float(ends[1]), 0.0)


def switch(name: str, value: Any) -> bool:
    """What turns something on or off.

    Raises:
        TypeError: if it is no bool: "off" would be on.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r}: give True or False.")
    return bool(value)
