"""Keras callbacks: pruning, clustering, quantization delay, freezing, and logging."""

from keras_qat.training import callbacks, clustering, sparsity
from keras_qat.training.callbacks import *  # noqa: F403
from keras_qat.training.clustering import *  # noqa: F403
from keras_qat.training.sparsity import *  # noqa: F403

__all__ = [*callbacks.__all__, *clustering.__all__, *sparsity.__all__]
