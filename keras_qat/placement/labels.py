"""What to call a layer in a sentence."""

from __future__ import annotations

from typing import Any

from keras_qat.operations import is_operation

__all__ = ["label"]


def label(layer: Any) -> str:
    """A layer's class; of an activation or operation its own name."""
    if is_operation(layer):
        return f"tf.{layer.symbol}"
    if type(layer).__name__ == "Activation":
        return str(getattr(layer.activation, "__name__", layer.activation))
    return type(layer).__name__
