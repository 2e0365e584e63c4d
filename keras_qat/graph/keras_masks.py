"""Computes the Keras masks of a graph's values. A mask marks padding in sequences.

The layers Embedding and Masking create a mask. Later layers compute output masks from input masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.keras2.backend import get_keras_mask, layers, set_keras_mask

_MERGING = (
    *(layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum),
    layers.Minimum,
)
"""Layers that combine the masks of all inputs with a logical and."""


def get_first_argument(call: Call) -> Any:
    """Returns the first argument of a call. Keras reads masks from this argument."""
    return call.args[0] if call.args else next(iter(call.kwargs.values()))


class KerasMasks:
    """Computes the Keras masks of a graph's values.

    Args:
        read: function that returns the `tf.Tensor` for a `Value` of the graph.
        find_producer: function that returns the call whose layer computes the mask of a value.
        convert: function `(mask, call) -> mask` that may change a mask that `call` computed.
    """

    def __init__(
        self,
        read: Callable[[Value], Any],
        find_producer: Callable[[Value], Call | None] = lambda value: value.producer,
        convert: Callable[[Any, Call], Any] = lambda mask, call: mask,
    ) -> None:
        self.read, self.find_producer, self.convert = read, find_producer, convert
        self._masks: dict[Value, Any] = {}

    def find(self, value: Value) -> tf.Tensor | None:
        call = self.find_producer(value)
        if not value.masked or call is None:
            return None
        if value not in self._masks:
            values = flatten_values(call.outputs)
            masks = tf.nest.flatten(self._compute(call))
            masks = [mask if mask is None else self.convert(mask, call) for mask in masks]
            self._masks.update(itertools.zip_longest(values, masks[: len(values)]))
        return self._masks[value]

    def _compute(self, call: Call) -> Any:
        first = get_first_argument(call)
        masks = map_values(self.find, first)
        if call.kwargs.get("mask") is not None:
            masks = map_values(self.read, call.kwargs["mask"])
        known = {id(mask): mask for mask in tf.nest.flatten(masks) if mask is not None}
        if len(known) == 1 and isinstance(call.layer, _MERGING):
            return next(iter(known.values()))
        return call.layer.compute_mask(map_values(self.read, first), masks if known else None)

    def attach(self, value: Value, tensor: tf.Tensor) -> tf.Tensor:
        """Returns `tensor` with the mask of `value`, or without a mask if `value` has none."""
        mask = self.find(value)
        if get_keras_mask(tensor) is not mask:
            tensor = tf.identity(tensor)
            set_keras_mask(tensor, mask)
        return tensor
