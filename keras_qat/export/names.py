"""What operations are called in an exported function, so that a file says which layer is which."""

from __future__ import annotations

import re
from collections.abc import Iterable

from keras_qat.keras2.graph import Call, values_in

__all__ = ["SCOPE", "in_scope", "scope_of"]

SCOPE = "keras_qat"
"""The name scope around everything: what of a file is not in it, the converter has added."""


def scope_of(call: Call) -> str:
    """The name scope of a call: the layer's path, with a mark behind it from the second call on.

    Example: `block/conv` and, called again, `block/conv>2`.
    """
    return as_scope(values_in(call.outputs)[0].name.split(":")[0])


def as_scope(name: str) -> str:
    """A name as TensorFlow takes it for a scope."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", ">", name)


def in_scope(name: str, scopes: Iterable[str]) -> str | None:
    """The scope that a tensor of a TFLite file was computed in: one of `scopes`, or None.

    Where the converter has merged operations it joins their names by `;`, the last of them first.
    Of scopes inside each other it is the inner one.
    """
    path = name.split(";")[0].removeprefix(f"{SCOPE}/").split("/")
    starts = ["/".join(path[:end]) for end in range(len(path), 0, -1)]
    known = set(scopes)
    return next((start for start in starts if start in known), None)
