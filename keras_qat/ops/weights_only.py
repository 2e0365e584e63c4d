"""Lists layers without integer operators whose weights files still hold in int8."""

from __future__ import annotations

from typing import Any

from keras_qat.frontend.keras2.backend import keras
from keras_qat.ops.registry import weights_listed

_layers = keras.layers

_CELL = ("kernel", "recurrent_kernel")
_OF_CELL = tuple(f"cell.{name}" for name in _CELL)

WEIGHTS_ONLY: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((_layers.Conv3D, _layers.Conv3DTranspose), ("kernel",)),
    **dict.fromkeys((_layers.LocallyConnected1D, _layers.LocallyConnected2D), ("kernel",)),
    **dict.fromkeys((_layers.LSTMCell, _layers.GRUCell, _layers.SimpleRNNCell), _CELL),
    **dict.fromkeys((_layers.LSTM, _layers.GRU, _layers.SimpleRNN), _OF_CELL),
    **dict.fromkeys((_layers.ConvLSTM1D, _layers.ConvLSTM2D, _layers.ConvLSTM3D), _OF_CELL),
}
"""Layer class without int8 operators -> paths of its weights that files hold in 8 bits."""


def weights_only(layer: Any) -> tuple[str, ...]:
    """Returns the paths of weights that a layer in float holds in 8 bits."""
    parts: dict[str, Any] = {}
    if isinstance(layer, _layers.Bidirectional):
        parts = {name: getattr(layer, name) for name in ("forward_layer", "backward_layer")}
    elif isinstance(layer, _layers.TimeDistributed):
        parts = {"layer": layer.layer}
    elif type(layer) is _layers.RNN:
        parts = {"cell": layer.cell}
    elif isinstance(layer, _layers.StackedRNNCells):
        parts = {f"cells.{index}": cell for index, cell in enumerate(layer.cells)}
    inner = [f"{name}.{path}" for name, part in parts.items() for path in weights_only(part)]
    return (*WEIGHTS_ONLY.get(type(layer), weights_listed(layer)), *inner)
