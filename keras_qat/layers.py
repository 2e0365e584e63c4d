"""The layers that a quantization-aware model is made of."""

from keras_qat.training.layers import *  # noqa: F403
from keras_qat.training.layers import __all__ as _all

__all__ = [*_all]
