"""Layers of quantization-aware models that compute in float, or not, because the plan says so."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["ask_for_integers", "asked_for_integers", "leave_in_float", "why_left_in_float"]

_REASONS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_ASKED_FOR: weakref.WeakSet[Any] = weakref.WeakSet()


def leave_in_float(layer: Any, reason: str) -> None:
    """Makes a layer compute in float, whatever operator it is. Models save this by name."""
    _REASONS[layer] = reason


def why_left_in_float(layer: Any) -> str | None:
    """The reason that `leave_in_float` was given for a layer, None for any other layer."""
    return _REASONS.get(layer)


def ask_for_integers(layer: Any) -> None:
    """Makes a layer compute in integers whose operator is `on_request`. Models save it by name."""
    _ASKED_FOR.add(layer)


def asked_for_integers(layer: Any) -> bool:
    """Whether `ask_for_integers` was called on a layer."""
    return layer in _ASKED_FOR
