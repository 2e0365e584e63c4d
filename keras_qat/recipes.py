"""Recipes: how a model is quantized, as data."""

from typing import Any

from keras_qat.config.recipes import *  # noqa: F403
from keras_qat.config.recipes import NAMED as _NAMED
from keras_qat.config.recipes import __all__ as _all
from keras_qat.messages import suggest

__all__ = [*_all]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"There is no recipe {name!r}.{suggest(name, _NAMED)} The recipes are: "
        f"{', '.join(_NAMED)}.",
        name=name,
    )
