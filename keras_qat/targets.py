"""Targets: the operators, types and limits of devices and runtimes, as data."""

from typing import Any

from keras_qat.config import targets as _targets
from keras_qat.config.targets import *  # noqa: F403
from keras_qat.export.target_problems import problems

__all__ = ["problems"]
__all__ += _targets.__all__


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"There is no target {name!r}. The targets are: {', '.join(_targets.known())}. "
        f"keras_qat.targets.register adds a custom target.",
        name=name,
    )
