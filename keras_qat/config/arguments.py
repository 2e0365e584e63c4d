"""Checks arguments."""

from __future__ import annotations

from typing import Any

import numpy as np


def read_input_range(input_range: Any) -> tuple[float, float] | None:
    """Checks the argument `input_range` of a user, and widens it to include zero."""
    if input_range is None:
        return None
    ends = np.asarray(input_range)
    is_range = ends.shape == (2,) and ends.dtype.kind in "iuf" and np.isfinite(ends).all()
    if not is_range or not ends[0] < ends[1]:
        raise ValueError(
            f"input_range={input_range!r}: pass the minimum and the maximum of the inputs, for "
            f"example (0.0, 1.0)."
        )
    return min(float(ends[0]), 0.0), max(float(ends[1]), 0.0)


def switch(name: str, value: object) -> bool:
    """Checks that the argument `name` is a bool. Without the check, `"off"` would mean True."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r}: pass True or False.")
    return bool(value)
