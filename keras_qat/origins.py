"""Which package a class or a function comes from."""

from __future__ import annotations

from typing import Any

KERAS = frozenset(("keras", "tf_keras"))
KNOWN = KERAS | {"keras_qat"}
"""Packages whose layers are read as they are: no code of a user."""
LIBRARIES = KNOWN | {"tensorflow", "builtins"}
"""Packages that Keras finds by name, and whose callbacks and models change no counter, and no range
that is frozen, on the way: at most when training or an epoch begins or ends."""


def get_package(item: Any) -> str:
    """Returns the package that defines a class or a function, or the class of another object."""
    module = getattr(item, "__module__", None) or type(item).__module__
    return str(module).split(".")[0]
