"""Recurrent layers that read the mask of a sequence as a tensor, beside the sequence.

Keras hands masks on out of sight. Files hold them as tensors.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras, layers, register

__all__ = ["MASKED", "reads_mask", "zeroes_output"]


class _Masked(layers.Layer):
    """Mixin of layers that are called with a sequence and its mask, [batch, steps] of booleans."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input_spec = [keras.layers.InputSpec(ndim=3), keras.layers.InputSpec(ndim=2)]

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # That of Keras' recurrent layers would take the second tensor for a state.
        return layers.Layer.__call__(self, inputs, *args, **kwargs)

    def build(self, input_shape: Any) -> None:
        # Keras 2.15 reads the sequence's shape alone from files, as a list of sizes.
        is_one = all(size is None or isinstance(size, int) for size in input_shape)
        super().build(tf.TensorShape(input_shape if is_one else input_shape[0]))

    def call(self, inputs: Any, training: Any = None) -> Any:
        sequence, mask = inputs
        return super().call(sequence, mask=mask, training=training)


@register
class MaskedGRU(_Masked, layers.GRU):
    """A `GRU` that reads a mask."""


@register
class MaskedLSTM(_Masked, layers.LSTM):
    """An `LSTM` that reads a mask."""


@register
class MaskedSimpleRNN(_Masked, layers.SimpleRNN):
    """A `SimpleRNN` that reads a mask."""


MASKED: dict[type, Any] = {
    layers.GRU: MaskedGRU,
    layers.LSTM: MaskedLSTM,
    layers.SimpleRNN: MaskedSimpleRNN,
}
"""Layer class -> the class of those that read a mask."""


def reads_mask(layer: Any) -> bool:
    """Returns whether a layer reads a mask as a tensor."""
    return isinstance(layer, _Masked)


def zeroes_output(layer: Any) -> bool:
    """Returns whether a recurrent layer returns zeros for masked steps, not the step before."""
    return bool(getattr(layer, "zero_output_for_mask", False))
