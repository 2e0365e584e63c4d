"""Warns of overrides without effect, as their result, a new recipe, was not assigned."""

from __future__ import annotations

import weakref
from typing import Any

from keras_qat.messages import warn_caller

_USED, _LOST = "_is_used", "_lost"
"""Attributes of a recipe beside its fields: a list that is not empty once it was used, and the
layers of overrides whose result nobody used."""


def made(recipe: Any, result: Any, layers: str) -> None:
    """Notes that a recipe made another one, with an override for these layers."""
    _note_use(recipe)
    is_used: list[bool] = []
    vars(result)[_USED] = is_used
    weakref.finalize(result, _forget, weakref.ref(recipe), is_used, layers).atexit = False


def use(recipe: Any) -> None:
    """Notes that a recipe is used, and warns if what it made with `override` never was."""
    _note_use(recipe)
    lost = vars(recipe).pop(_LOST, None)
    if lost:
        warn_caller(
            f"recipe.override({lost[0]!r}, ...) returns a new recipe, which was not used; the one "
            f"in use has no such override. Write recipe = recipe.override({lost[0]!r}, ...)."
        )


def _note_use(recipe: Any) -> None:
    vars(recipe).get(_USED, []).append(True)


def _forget(recipe: weakref.ref[Any], is_used: list[bool], layers: str) -> None:
    """Notes on a recipe that what it made ceased to exist, unless that was used."""
    parent = recipe()
    if parent is not None and not is_used:
        vars(parent).setdefault(_LOST, []).append(layers)
