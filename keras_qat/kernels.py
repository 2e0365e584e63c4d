"""Which layers have kernels, and which axes of a kernel are its output channels."""

from __future__ import annotations

from typing import Any

from keras_qat.keras2.backend import keras

__all__ = ["AFFINE", "FOLDABLE", "KERNELS", "WEIGHTS_ONLY", "weights_only"]

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

_CELL = ("kernel", "recurrent_kernel")

WEIGHTS_ONLY: dict[type, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            _layers.Conv3D,
            _layers.Conv3DTranspose,
            _layers.LocallyConnected1D,
            _layers.LocallyConnected2D,
        ),
        ("kernel",),
    ),
    **dict.fromkeys((_layers.LSTMCell, _layers.GRUCell, _layers.SimpleRNNCell), _CELL),
    **dict.fromkeys(
        (
            _layers.LSTM,
            _layers.GRU,
            _layers.SimpleRNN,
            _layers.ConvLSTM1D,
            _layers.ConvLSTM2D,
            _layers.ConvLSTM3D,
        ),
        tuple(f"cell.{name}" for name in _CELL),
    ),
}
"""Layer class without int8 kernels -> paths of its weights that files hold in 8 bits."""


def weights_only(layer: Any) -> tuple[str, ...]:
    """The paths of the weights that a layer which computes in float holds in 8 bits."""
    parts: dict[str, Any] = {}
    if isinstance(layer, _layers.Bidirectional):
        parts = {name: getattr(layer, name) for name in ("forward_layer", "backward_layer")}
    elif isinstance(layer, _layers.TimeDistributed):
        parts = {"layer": layer.layer}
    elif type(layer) is _layers.RNN:
        parts = {"cell": layer.cell}
    elif isinstance(layer, _layers.StackedRNNCells):
        parts = {f"cells.{index}": cell for index, cell in enumerate(layer.cells)}
    found = [f"{name}.{path}" for name, part in parts.items() for path in weights_only(part)]
    return (*WEIGHTS_ONLY.get(type(layer), KERNELS.get(type(layer), ())), *found)
