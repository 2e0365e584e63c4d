"""Keras callbacks that delay quantization, or freeze BatchNormalization, ranges and weights."""

from keras_qat.training import callbacks
from keras_qat.training.callbacks import *  # noqa: F403

__all__ = [*callbacks.__all__]
