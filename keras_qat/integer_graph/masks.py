"""Keras' masks: which steps of a sequence are padding, for the layers in float that look at them.

Integer computations carry no masks. Where a layer needs one, it is computed from what the layers
before it say, beginning at those that make masks: Embedding, Masking.
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
    """The masks of a model's values.

    Args:
        number_of: gives the real numbers or integers of a value, None of one that is not there.
    """

    def __init__(self, number_of: Callable[[Value], Any]) -> None:
        self.number_of = number_of
        self._found: dict[Value, Any] = {}

    def of(self, value: Value) -> Any:
        """The mask of a value, bool; None without one."""
        call = value.producer
        if not value.masked or call is None:
            return None
        if value not in self._found:
            values = values_in(call.outputs)
            masks = tf.nest.flatten(self._given_by(call))
            self._found.update(itertools.zip_longest(values, masks[: len(values)]))
        return self._found[value]

    def _given_by(self, call: Call) -> Any:
        """The masks of a call's outputs."""
        first = _first_argument(call)
        masks = map_values(self.of, first)
        if call.kwargs.get("mask") is not None:
            masks = map_values(self.number_of, call.kwargs["mask"])
        if all(each is None for each in tf.nest.flatten(masks)):
            masks = None
        return call.layer.compute_mask(map_values(self.number_of, first), masks)

    def attached(self, value: Value, number: Any) -> Any:
        """What a value holds, carrying the value's mask and no other."""
        mask = self.of(value)
        if mask_of(number) is mask:
            return number
        number = tf.identity(number)
        set_mask(number, mask)
        return number


def read_for_masks(call: Call) -> list[Value]:
    """What the masks of a call's inputs are computed from, besides other masks."""
    found: dict[Value, None] = {}
    seen: set[Call] = set()
    wanted = [value.producer for value in call.inputs if value.masked]
    while wanted:
        producer = wanted.pop()
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        first = values_in(_first_argument(producer))
        if _reads_inputs(producer.layer):
            found.update(dict.fromkeys(first))
        mask = producer.kwargs.get("mask")
        found.update(dict.fromkeys(values_in(mask)))
        wanted += [value.producer for value in first if value.masked]
    return list(found)


def _first_argument(call: Call) -> Any:
    return call.args[0] if call.args else next(iter(call.kwargs.values()))


def _reads_inputs(layer: Any) -> bool:
    """Whether a layer's mask depends on more than its inputs' masks."""
    while isinstance(layer, (QuantizeWrapper, QuantizeWeights)):
        layer = layer.layer
    method = type(layer).compute_mask
    return not isinstance(layer, Quantize) and method is not keras.layers.Layer.compute_mask
