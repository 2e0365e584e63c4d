"""Selects the cases that run by default, and the slow tests of each part of the rotation."""

import collections
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from benchmarks.rotation import find_part


def fraction_of(text: str) -> float:
    """Returns a value from 0 to 1 that looks random and is the same for the same text."""
    return zlib.crc32(text.encode()) / 2**32


def representative(cases: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """Returns `count` cases of a test whose parameters together have as many values as possible."""
    rest = sorted(cases, key=lambda case: fraction_of(case.name))
    used: collections.Counter[Any] = collections.Counter()
    kept: list[pytest.Item] = []
    while rest and len(kept) < count:
        best = min(rest, key=lambda case: sorted(used[value] for value in _values(case)))
        rest.remove(best)
        kept.append(best)
        used.update(_values(best))
    return kept


def _values(case: Any) -> list[Any]:
    """Returns the parameters of a case with their values, in countable form."""
    return [
        (name, value if isinstance(value, str | int | float | bool | None) else id(value))
        for name, value in case.callspec.params.items()
    ]


def leave_the_rest_to_slow(items: Iterable[pytest.Item]) -> None:
    """Marks all cases of a test with `pytest.mark.sample(count)` as slow, except a sample."""
    cases: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            name = getattr(item, "originalname", item.name)
            cases.setdefault((item.path, name), []).append(item)
    for group in cases.values():
        (count,) = group[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        kept = {item.nodeid for item in representative(group, count)}
        for item in group:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.slow)


def keep_part(items: list[pytest.Item], part: int) -> list[pytest.Item]:
    """Removes slow tests of other parts of the rotation, and returns them.

    Cases that share exports, such as a family of layers, stay together.
    """
    left_out = []
    for item in items:
        family = getattr(item, "callspec", None) and item.callspec.params.get("family")
        together = isinstance(family, str) and "end_to_end" in item.nodeid
        name = f"{item.path.name}-{family}" if together else item.nodeid
        if item.get_closest_marker("slow") and find_part(name) != part:
            left_out.append(item)
    removed = {item.nodeid for item in left_out}
    items[:] = [item for item in items if item.nodeid not in removed]
    return left_out
