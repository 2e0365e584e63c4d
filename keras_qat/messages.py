"""Builds parts of messages, and shows those that are no warnings."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from keras_qat.origins import LIBRARIES

_PASSED_OVER = LIBRARIES | {"contextlib"}
"""Packages whose lines are not those of a user's program."""

_LOGGER = logging.getLogger("keras_qat")
_SHOWN: set[str] = set()
_IS_SILENT: ContextVar[bool] = ContextVar("is silent", default=False)


def show_once(message: str, key: str = "") -> None:
    """Logs a message, unless one with the same key was logged before in this process.

    It is for facts that may be just as wanted; what is probably wrong is a warning. Python shows it
    on the standard error stream; `logging.getLogger("keras_qat").setLevel("ERROR")` hides it.
    """
    key = key or message
    if key not in _SHOWN and not _IS_SILENT.get():
        _SHOWN.add(key)
        _LOGGER.warning(message)


def warn_caller(message: str) -> None:
    """Warns about the line of the user's program that called this library, also through Keras."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Runs a block in which `show_once` shows nothing, as of models that are only tried."""
    token = _IS_SILENT.set(True)
    try:
        yield
    finally:
        _IS_SILENT.reset(token)


def pluralize(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun, in the plural unless the number is 1: "3 layers"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def suggest(name: object, names: Iterable[str]) -> str:
    """Returns " Did you mean ...?" with the nearest of some names, or nothing if none is near."""
    near = difflib.get_close_matches(str(name), names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def describe_unknown(noun: str, name: object, names: Collection[str]) -> str:
    """Returns what the error for an unknown name says: up to three similar names, or the first."""
    near = difflib.get_close_matches(str(name), names, n=3)
    shown = near or list(names)[:8]
    more = ", ..." if len(names) > len(shown) else ""
    return (
        f"There is no {noun} {name!r}. {'Similar names' if near else 'Known names'}: "
        f"{', '.join(shown)}{more}"
    )


class ByName(dict[str, Any]):
    """What is read by a tensor's name. The error for an unknown name lists similar names."""

    def __missing__(self, name: Any) -> Any:
        raise KeyError(describe_unknown("tensor", name, self))
