"""Interface through which folding reads a `QuantizeWrapper`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from keras_qat.config.specs import QuantSpec
from keras_qat.training.layers.quantize import ActivationQuantizer
from keras_qat.training.layers.weight_quantizer import WeightQuantizer


class Weighted(Protocol):
    """A layer with weights, the BatchNormalization behind it, and the quantizers of the weights."""

    layer: Any
    """The Keras layer, or an affine one: BatchNormalization, Normalization, Rescaling."""
    batch_norm: Any
    """The BatchNormalization behind it, or None."""
    weight_axes: dict[str, tuple[int, ...]]
    """Path of each weight -> axes of its output channels, counted from the end; none if affine."""
    weight_spec: QuantSpec | None
    weight_quantizers: Mapping[str, WeightQuantizer]
    """The quantizers, by the paths of their weights; none where weights stay in float."""
    channels: int
    """Number of channels that the layer reads."""
    state_bits: int
    """Bits of the state that an LSTM reads again."""
    inner: dict[str, ActivationQuantizer]
    """Quantizers of the tensors inside a step of a recurrent layer, by name."""
