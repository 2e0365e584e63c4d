"""Keras callbacks: quantization delay, and freezing."""

from keras_qat.training import callbacks
from keras_qat.training.callbacks import *  # noqa: F403

__all__ = [*callbacks.__all__]
