"""Notes of the plan's decisions on Keras' own layers; models save them by the layer's name."""

from __future__ import annotations

from typing import Any


def leave_in_float(layer: Any, reason: str) -> None:
    """Makes a layer compute in float, whatever its operator."""
    layer.keras_qat_float_reason = reason


def why_left_in_float(layer: Any) -> str | None:
    """Returns the reason that `leave_in_float` noted; None for any other layer."""
    return getattr(layer, "keras_qat_float_reason", None)


def ask_for_integers(layer: Any) -> None:
    """Makes a layer compute in integers whose operator does so `on_request` only."""
    layer.keras_qat_asked_for = True


def asked_for_integers(layer: Any) -> bool:
    """Whether `ask_for_integers` was called on a layer."""
    return getattr(layer, "keras_qat_asked_for", False)
