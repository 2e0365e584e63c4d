"""What tensors are called, so that a file says which layer is which."""

from __future__ import annotations

import re
from collections.abc import Iterable

from keras_qat.keras2.graph import Call, Value, values_in
from keras_qat.layers import Quantize, QuantizeWrapper

__all__ = ["PREFIX", "SCOPE", "as_scope", "in_scope", "label_of", "scope_of"]

PREFIX = "quant_"
"""Goes in front of the name of every layer but the inputs."""

SCOPE = "keras_qat"
"""The name scope around everything in a file: what is not in it was added by a converter."""


def scope_of(call: Call, value: Value | None = None) -> str:
    """The name of a call, or of one of its outputs: the layer's path.

    From the second call on, and of the second output on, with a mark behind it. Example:
    `block/conv` and, called again, `block/conv>2`.
    """
    values = values_in(call.outputs)
    name = as_scope(values[0].name.split(":")[0])
    place = 0 if value is None else values.index(value)
    return name if place == 0 else f"{name}:{place}"


def as_scope(name: str) -> str:
    """A name as TensorFlow takes it for a scope."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", ">", name)


def in_scope(name: str, scopes: Iterable[str]) -> str | None:
    """The scope that a tensor of a TFLite file was computed in: one of `scopes`, or None.

    Of scopes inside each other it is the inner one.
    """
    path = name.split(";")[0].removeprefix(f"{SCOPE}/").split("/")
    starts = ["/".join(path[:end]) for end in range(len(path), 0, -1)]
    known = set(scopes)
    return next((start for start in starts if start in known), None)


def label_of(value: Value) -> str:
    """The name that a tensor of a quantization-aware model has in the float model."""
    call = value.producer
    layer = call.layer if call else None
    if isinstance(layer, QuantizeWrapper):
        return str(layer.tensor)
    if isinstance(layer, Quantize) and call is not None and call.kwargs.get("slot") is not None:
        return str(layer.tensors[call.kwargs["slot"]])
    return value.name.removeprefix(PREFIX)
