"""Layers of quantization-aware models that compute in float because the plan says so."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["leave_in_float", "why_left_in_float"]

_REASONS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def leave_in_float(layer: Any, reason: str) -> None:
    """Makes a layer compute in float, whatever operator it is. Models save this by name."""
    _REASONS[layer] = reason


def why_left_in_float(layer: Any) -> str | None:
    """The reason that `leave_in_float` was given for a layer, None for any other layer."""
    return _REASONS.get(layer)
