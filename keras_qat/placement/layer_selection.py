"""Which layers a user means by a name, a pattern, a class or a function."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import keras

__all__ = ["Scope", "check_entries", "check_scope", "matcher"]

Scope = str | Iterable[str] | Callable[[Any], bool]
"""A layer's name; if no layer has it, the beginning of names, up to a `_`, `/`, `.` or `-`; a
pattern with `*`; a class name; a list of those; or a function that takes a layer."""


def check_scope(scope: Scope | None, calls: list[Call], inputs: Iterable[str]) -> None:
    """Raises a `ValueError` if an entry of a list matches no layer: it may be mistyped.

    Args:
        scope: what a user gave.
        calls: those of the model as it was read, where each layer is still there.
        inputs: names of the model's inputs, which may stand in a list of all layers' names.
    """
    if scope is None:
        return
    check_entries(scope)
    if isinstance(scope, str) or callable(scope):
        return
    names, known = {call.origin for call in calls}, set(inputs)
    missing = [
        pattern
        for pattern in scope
        if isinstance(pattern, str)
        and pattern not in known
        and not any(_matches(call, pattern, pattern in names) for call in calls)
    ]
    if missing:
        raise ValueError(_no_match(missing, calls))


def check_entries(scope: Any) -> None:
    """Raises a `ValueError` if something in a scope is neither a name nor a function."""
    entries = scope if isinstance(scope, (list, tuple, set, frozenset)) else [scope]
    for each in entries:
        if isinstance(each, keras.layers.Layer):
            raise ValueError(f"Layers are named in a scope: give {each.name!r}, not the layer.")
        if isinstance(each, type) and issubclass(each, keras.layers.Layer):
            raise ValueError(f"Classes are named in a scope: give {each.__name__!r}.")
        if not (each if isinstance(each, str) else callable(each) or hasattr(each, "__iter__")):
            raise ValueError(
                f"{each!r} is no scope: give the name of a layer or of a class, a pattern with *, "
                f"a list of those, or a function that takes a layer."
            )


def _no_match(patterns: Any, calls: list[Call]) -> str:
    """Says which layers there are, first those that may have been meant."""
    shown = list(dict.fromkeys(call.origin for call in calls))
    words = [*shown, *dict.fromkeys(type(call.source).__name__ for call in calls)]
    near = [
        found
        for pattern in patterns
        if isinstance(pattern, str)
        for found in difflib.get_close_matches(pattern, words, n=1)
    ]
    given = ", ".join(repr(each) for each in patterns) or "An empty scope"
    meant = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
    listed = ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
    return f"{given} matches no layer.{meant} The layers are: {listed}"


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
        raise ValueError(_no_match(patterns, calls))
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
