"""Which layers a user means by a name, a pattern, a class or a function."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

from keras_qat.keras2.graph import Call

__all__ = ["Scope", "matcher"]

Scope = str | Iterable[str] | Callable[[Any], bool]
"""A layer's name; if no layer has it, the beginning of names, up to a `_`, `/`, `.` or `-`; a
pattern with `*`; a class name; a list of those; or a function that takes a layer."""


def matcher(scope: Scope, calls: list[Call]) -> Callable[[Call], bool]:
    """The scope as a function of the model's calls.

    Raises:
        ValueError: if it matches none of them; the message lists the layers.
    """
    names = {call.origin for call in calls}
    patterns = [scope] if isinstance(scope, str) or callable(scope) else list(scope)

    def matches(call: Call) -> bool:
        return any(
            any(map(pattern, (call.source, *call.within)))
            if callable(pattern)
            else _matches(call, pattern, pattern in names)
            for pattern in patterns
        )

    if not any(matches(call) for call in calls):
        shown = list(dict.fromkeys(call.origin for call in calls))
        listed = ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
        raise ValueError(f"{scope!r} matches no layer. The layers are: {listed}")
    return matches


def _matches(call: Call, pattern: str, is_name: bool) -> bool:
    name = call.origin
    if is_name:
        return name == pattern
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    if pattern in [type(each).__name__ for each in (call.layer, call.source, *call.within)]:
        return True
    rest = name.removeprefix(pattern)
    return name.startswith(pattern) and (not rest or pattern[-1] in "_/.-" or rest[0] in "_/.-")
