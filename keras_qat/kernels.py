"""Which layers have kernels, and which axes of a kernel are its output channels."""

from __future__ import annotations

from keras_qat.backend import keras

__all__ = ["KERNELS"]

_layers = keras.layers

KERNELS: dict[type, dict[str, tuple[int, ...]]] = {
    _layers.Conv2D: {"kernel": (-1,)},
    _layers.DepthwiseConv2D: {"depthwise_kernel": (-2, -1)},
    _layers.Dense: {"kernel": (-1,)},
}
"""Layer class -> attribute of each weight that is quantized -> axes of its output channels,
counted from the end. Biases are not listed: their scale follows from the others."""
