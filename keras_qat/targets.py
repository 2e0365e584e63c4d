"""Targets. Each states the operators, types and limits of a device or runtime."""

from keras_qat.config import targets as _targets
from keras_qat.config.targets import *  # noqa: F403
from keras_qat.export.target_problems import problems

__all__ = ["problems"]
__all__ += _targets.__all__
