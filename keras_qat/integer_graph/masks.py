"""Keras masks, which mark the padding of a sequence, for layers in float that need them.

Integer tensors carry no masks. Where a layer needs one, it is computed through the layers before
it, from the layer on that makes the mask: Embedding or Masking.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.frontend.graph import Call, Value, map_values, values_in
from keras_qat.frontend.keras2.backend import keras, mask_of, set_mask
from keras_qat.training.layers import Quantize, QuantizeWeights, QuantizeWrapper


class Masks:
    """Computes the masks of a model's values.

    Args:
        number_of: returns the real numbers or integers of a value, None if it is not computed.
    """

    def __init__(self, number_of: Callable[[Value], Any]) -> None:
        self.number_of = number_of
        self._masks: dict[Value, Any] = {}

    def of(self, value: Value) -> Any:
        """Returns the boolean mask of a value, or None."""
        call = value.producer
        if not value.masked or call is None:
            return None
        if value not in self._masks:
            values = values_in(call.outputs)
            masks = tf.nest.flatten(self._computed_by(call))
            self._masks.update(itertools.zip_longest(values, masks[: len(values)]))
        return self._masks[value]

    def _computed_by(self, call: Call) -> Any:
        """Computes the masks of a call's outputs."""
        first = _first_argument(call)
        masks = map_values(self.of, first)
        if call.kwargs.get("mask") is not None:
            masks = map_values(self.number_of, call.kwargs["mask"])
        if all(mask is None for mask in tf.nest.flatten(masks)):
            masks = None
        return call.layer.compute_mask(map_values(self.number_of, first), masks)

    def attached(self, value: Value, number: Any) -> Any:
        """Returns a value's tensor with the value's mask attached, and no other."""
        mask = self.of(value)
        if mask_of(number) is mask:
            return number
        number = tf.identity(number)
        set_mask(number, mask)
        return number


def read_for_masks(call: Call) -> list[Value]:
    """Returns the values from which the masks of a call's inputs are computed."""
    read: dict[Value, None] = {}
    seen: set[Call] = set()
    pending = [value.producer for value in call.inputs if value.masked]
    while pending:
        producer = pending.pop()
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        first = values_in(_first_argument(producer))
        if _reads_inputs(producer.layer):
            read.update(dict.fromkeys(first))
        mask = producer.kwargs.get("mask")
        read.update(dict.fromkeys(values_in(mask)))
        pending += [value.producer for value in first if value.masked]
    return list(read)


def _first_argument(call: Call) -> Any:
    return call.args[0] if call.args else next(iter(call.kwargs.values()))


def _reads_inputs(layer: Any) -> bool:
    """Whether a layer's mask depends on more than its inputs' masks."""
    while isinstance(layer, (QuantizeWrapper, QuantizeWeights)):
        layer = layer.layer
    method = type(layer).compute_mask
    return not isinstance(layer, Quantize) and method is not keras.layers.Layer.compute_mask
