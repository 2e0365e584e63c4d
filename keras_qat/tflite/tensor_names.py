"""Names of tensors in files, which tell the layer that computes a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable

SCOPE = "keras_qat"
"""The name scope of everything that this library writes. Converters add tensors outside of it."""


def as_scope(name: str) -> str:
    """Turns a name into one that TensorFlow accepts as a scope."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", ">", name)


def in_scope(name: str, scopes: Iterable[str]) -> str | None:
    """Returns the innermost of `scopes` in which a tensor of a file was computed, or None."""
    path = name.split(";")[0].removeprefix(f"{SCOPE}/").split("/")
    starts = ["/".join(path[:end]) for end in range(len(path), 0, -1)]
    known = set(scopes)
    return next((start for start in starts if start in known), None)
