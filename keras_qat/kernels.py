"""Which layers have kernels, and which axes of a kernel are its output channels."""

from __future__ import annotations

from keras_qat.backend import keras

__all__ = ["AFFINE", "FOLDABLE", "KERNELS"]

_layers = keras.layers

KERNELS: dict[type, dict[str, tuple[int, ...]]] = {
    _layers.Conv1D: {"kernel": (-1,)},
    _layers.Conv2D: {"kernel": (-1,)},
    _layers.Conv1DTranspose: {"kernel": ()},
    _layers.Conv2DTranspose: {"kernel": ()},
    _layers.DepthwiseConv1D: {"depthwise_kernel": (-2, -1)},
    _layers.DepthwiseConv2D: {"depthwise_kernel": (-2, -1)},
    _layers.Dense: {"kernel": (-1,)},
    _layers.EinsumDense: {"kernel": ()},
    _layers.Embedding: {"embeddings": ()},
}
"""Layer class -> attribute of each weight that is quantized -> axes of its output channels,
counted from the end; none for a single range, where the converter takes no other. Biases are not
listed: their scale follows from the others."""

FOLDABLE = {
    _layers.Conv1D,
    _layers.Conv2D,
    _layers.DepthwiseConv1D,
    _layers.DepthwiseConv2D,
    _layers.Dense,
}
"""Layers that take in the BatchNormalization behind them: a range per channel, and a bias."""

AFFINE = {_layers.BatchNormalization, _layers.Rescaling, _layers.Normalization}
"""Layers that multiply and add per channel: a 1x1 depthwise convolution at run time, whose weights
are single numbers per channel and so always exact. BatchNormalization where it is not folded."""
