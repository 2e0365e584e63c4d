"""Names in files: which layer computes a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["SCOPE", "as_scope", "in_scope"]

SCOPE = "keras_qat"
"""The name scope around everything in a file: what is not in it was added by a converter."""


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
