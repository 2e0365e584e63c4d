"""Functions that create recipes. A recipe states how a model is quantized."""

from keras_qat.config.recipes import *  # noqa: F403
from keras_qat.config.recipes import __all__ as _all

__all__ = [*_all]
