"""Keras callbacks: quantization delay, freezing of statistics and ranges, and logging."""

from keras_qat.training.callbacks import *  # noqa: F403
from keras_qat.training.callbacks import __all__ as _all

__all__ = [*_all]
