"""Matches layers by a name, a pattern, a class name or a function."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

from keras_qat.graph.calls import Call
from keras_qat.keras2.backend import keras

Scope = str | Iterable[str] | Callable[[Any], bool]
"""A layer's name, a prefix of names that ends before `_`, `/`, `.` or `-`, a pattern with `*`, a
class name, a list of these, or a function that takes a layer."""


def check_scope(scope: Scope | None, calls: list[Call], inputs: Iterable[str]) -> None:
    """Raises a `ValueError` if an entry of a list matches no layer, as it may be mistyped.

    Args:
        scope: the user's scope.
        calls: calls of the model as it was read, with all of its layers.
        inputs: names of the model's inputs, which a list of all layers' names contains.
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
    """Raises a `ValueError` if an entry of a scope is neither a name nor a function."""
    entries = scope if isinstance(scope, (list, tuple, set, frozenset)) else [scope]
    for item in entries:
        if isinstance(item, keras.layers.Layer):
            raise ValueError(f"The scope contains a layer: pass its name, {item.name!r}.")
        if isinstance(item, type) and issubclass(item, keras.layers.Layer):
            raise ValueError(f"The scope contains a class: pass its name, {item.__name__!r}.")
        if not (item if isinstance(item, str) else callable(item) or hasattr(item, "__iter__")):
            raise ValueError(
                f"{item!r} is not a scope: pass the name of a layer or a class, a pattern with *, "
                f"a list of these, or a function of a layer."
            )


def _no_match(patterns: Any, calls: list[Call]) -> str:
    """Builds the message that lists the layers, with close matches first."""
    shown = list(dict.fromkeys(call.origin for call in calls))
    words = [*shown, *dict.fromkeys(type(call.source).__name__ for call in calls)]
    near = [
        word
        for pattern in patterns
        if isinstance(pattern, str)
        for word in difflib.get_close_matches(pattern, words, n=1)
    ]
    names = ", ".join(map(_described, patterns)) or "An empty scope"
    meant = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
    listed = ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
    return f"{names} matches no layer.{meant} The layers are: {listed}"


def _described(pattern: Any) -> str:
    name = getattr(pattern, "__name__", None)
    return repr(pattern) if name is None else f"The function {name}"


def matcher(scope: Scope, calls: list[Call], required: bool = True) -> Callable[[Call], bool]:
    """Turns a scope into a function of the model's calls.

    Raises:
        ValueError: if it matches none of them, but is `required` to; the message lists the layers.
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

    if required and not any(matches(call) for call in calls):
        raise ValueError(_no_match(patterns, calls))
    return matches


def _matches(call: Call, pattern: str, is_name: bool) -> bool:
    name = call.origin
    if is_name:
        return name == pattern
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    if pattern in [type(layer).__name__ for layer in (call.layer, call.source, *call.within)]:
        return True
    rest = name.removeprefix(pattern)
    return name.startswith(pattern) and (not rest or pattern[-1] in "_/.-" or rest[0] in "_/.-")
