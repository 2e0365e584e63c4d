"""Builds parts of messages, and shows those that are no warnings."""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger("keras_qat")
_SHOWN: set[str] = set()


def show_once(message: str, key: str = "") -> None:
    """Logs a message, unless one with the same key was logged before in this process.

    It is for facts that may be just as wanted; what is probably wrong is a warning. Python shows it
    on the standard error stream; `logging.getLogger("keras_qat").setLevel("ERROR")` hides it.
    """
    key = key or message
    if key not in _SHOWN:
        _SHOWN.add(key)
        _LOGGER.warning(message)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun, in the plural unless the number is 1: "3 layers"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
