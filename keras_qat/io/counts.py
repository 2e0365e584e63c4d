"""Checks numbers of examples, batches, steps and bits that users pass."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def check_count(name: str, count: Any, least: int = 1) -> int:
    """Returns an integer argument as an `int`; NumPy's and TensorFlow's integers are integers too.

    Args:
        name: the argument's name.
        count: its value.
        least: the smallest value that is accepted.

    Raises:
        ValueError: if it is not an integer, or less than `least`.
    """
    number = as_integer(count)
    if number is None or number < least:
        advice = f"pass an integer of at least {least}."
        if np.ndim(count):
            raise ValueError(f"{name} is an array: {advice} Labels are not needed.")
        raise ValueError(f"{name}={count!r}: {advice}")
    return number


def check_counts(**counts: Any) -> None:
    """Raises a `ValueError` if an argument is neither None nor an integer of at least 1."""
    for name, count in counts.items():
        if count is not None:
            check_count(name, count)


def as_integer(value: Any) -> int | None:
    """Returns an integer of any type as an `int`; None for other values, and for bools."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except (TypeError, AttributeError):  # The latter is TensorFlow's.
        return None
