"""Checks integer arguments: numbers of examples, batches, steps and bits."""

from __future__ import annotations

import operator

import numpy as np


def check_count(name: str, count: object, least: int = 1) -> int:
    """Returns an integer of Python, NumPy or TensorFlow as an `int`.

    Raises a `ValueError` if `count` is less than `least`, or is no integer.
    """
    number = as_integer(count)
    if number is None or number < least:
        advice = f"pass an integer of at least {least}."
        if np.ndim(count):  # type: ignore[arg-type]
            raise ValueError(f"{name} is an array: {advice} Labels are not needed.")
        raise ValueError(f"{name}={count!r}: {advice}")
    return number


def check_counts(**counts: object) -> None:
    """Raises a `ValueError` unless each argument is None or a positive integer."""
    for name, count in counts.items():
        if count is not None:
            check_count(name, count)


def as_integer(value: object) -> int | None:
    """Returns an integer of any type as an `int`. Returns None for bools and other values."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, AttributeError):  # TensorFlow raises TypeError.
        return None
