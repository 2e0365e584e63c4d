"""Builds messages, shows notices and warnings, and finds the package of a class."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

KERAS = frozenset(("keras", "tf_keras"))
KNOWN = KERAS | {"keras_qat"}
"""Packages without custom layers."""
LIBRARIES = KNOWN | {"tensorflow", "builtins"}
"""Packages that contain no models or callbacks of the user."""

Value = TypeVar("Value")

_LOGGER = logging.getLogger("keras_qat")
_SHOWN: set[str] = set()
_IS_SILENT: ContextVar[bool] = ContextVar("is silent", default=False)


def get_package(item: object) -> str:
    """Returns the name of the package that defines `item`, or that defines the class of `item`."""
    module = getattr(item, "__module__", None) or type(item).__module__
    return str(module).split(".")[0]


def show_once(message: str, key: str = "") -> None:
    """Logs a message once per process. Messages with the same `key` count as one message.

    Use this function for facts that the user may intend. Use a warning for probable mistakes. The
    message appears on the standard error stream. `logging.getLogger("keras_qat").setLevel("ERROR")`
    hides it.
    """
    key = key or message
    if key not in _SHOWN and not _IS_SILENT.get():
        _SHOWN.add(key)
        _LOGGER.warning(message)


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Shows a warning for the line of the user's program that called this library."""
    skipped = LIBRARIES | {"contextlib"}
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in skipped:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


@contextlib.contextmanager
def set_within(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Sets a context variable to `value` within a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def silent() -> AbstractContextManager[None]:
    """Silences `show_once` within a `with` block."""
    return set_within(_IS_SILENT, True)


def pluralize(number: int, noun: str, plural: str = "") -> str:
    """Returns a number and a noun in singular or plural, such as "3 layers"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def suggest(name: object, names: Iterable[str]) -> str:
    """Returns " Did you mean ...?" with the most similar name. Returns "" if no name is similar."""
    near = difflib.get_close_matches(str(name), names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def describe_unknown(noun: str, name: object, names: Collection[str]) -> str:
    """Returns the error message for an unknown name. It lists similar or known names."""
    near = difflib.get_close_matches(str(name), names, n=3)
    shown = near or list(names)[:8]
    more = ", ..." if len(names) > len(shown) else ""
    return (
        f"There is no {noun} {name!r}. {'Similar names' if near else 'Known names'}: "
        f"{', '.join(shown)}{more}"
    )


class ByName(dict[str, Any]):
    """A dict with names of tensors as keys. The error for an unknown name lists similar names."""

    def __missing__(self, name: object) -> Any:
        raise KeyError(describe_unknown("tensor", name, self))
