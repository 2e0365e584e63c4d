"""Specifications. Each states how one tensor is quantized."""

from keras_qat.config.specs import *  # noqa: F403
from keras_qat.config.specs import __all__ as _all

__all__ = [*_all]
