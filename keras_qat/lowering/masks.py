"""Masks that Keras hands from layer to layer out of sight, as tensors of the graph."""

from __future__ import annotations

import tensorflow as tf

from keras_qat.frontend.graph import Value
from keras_qat.frontend.helper_layers import CarryMask, ReverseSteps
from keras_qat.frontend.keras2.backend import keras, layers
from keras_qat.frontend.masked_recurrent import reads_mask
from keras_qat.frontend.tf_operations import operation_class
from keras_qat.lowering.builder import PartsBuilder

_MERGES = layers.Add, layers.Average, layers.Concatenate, layers.Multiply
"""Layers whose output has the masks of all inputs at once."""


def mask_of(value: Value, parts: PartsBuilder) -> Value | None:
    """Returns the mask of a sequence, [batch, steps] of booleans; None where it is not known.

    It is followed through layers that hand it on, to an Embedding that makes it.

    Args:
        value: the sequence.
        parts: takes the call that computes the mask.
    """
    call = value.producer
    if call is None:
        return None
    layer, first = call.layer, call.inputs[0]
    if isinstance(layer, layers.Embedding):
        if not layer.mask_zero or first.is_float:
            return None
        compared = parts.new("mask", operation_class(), tf.not_equal)
        mask = Value(parts.path(compared), first.shape, "bool")
        return parts.add(compared, first, 0, output=mask)
    if isinstance(layer, CarryMask):
        return call.kwargs["mask"]
    if isinstance(layer, ReverseSteps) and first.producer is not None:
        backwards = first.producer  # The other direction of a Bidirectional, in its mask's order.
        return backwards.inputs[1] if reads_mask(backwards.layer) else None
    if reads_mask(layer):
        in_order = layer.return_sequences and not layer.go_backwards
        return call.inputs[1] if in_order else None
    hands_on = type(layer).compute_mask is keras.layers.Layer.compute_mask
    if isinstance(layer, _MERGES):
        masks = [mask_of(item, parts) for item in call.inputs]
        sources = {mask.producer.inputs[0] for mask in masks if mask and mask.producer}
        return masks[0] if None not in masks and len(sources) == 1 else None
    is_one = len(call.inputs) == 1 and first.shape[:2] == value.shape[:2]
    return mask_of(first, parts) if hands_on and layer.supports_masking and is_one else None
