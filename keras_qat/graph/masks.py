"""Keras masks, which mark the padding of a sequence, computed apart from the layers' outputs.

A mask is computed through the layers before a tensor, from the layer on that makes the mask:
Embedding or Masking.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.keras2.backend import get_keras_mask, layers, set_keras_mask


def first_argument(call: Call) -> Any:
    """Returns the argument of a call whose masks Keras hands on."""
    return call.args[0] if call.args else next(iter(call.kwargs.values()))


_ELEMENTWISE = (
    *(layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum),
    layers.Minimum,
)
"""Layers whose mask is True where those of all inputs are."""


class Masks:
    """Computes the masks of a model's values.

    Args:
        number_of: returns the numbers, or a symbolic tensor, of a value; None if it has none.
        made_by: returns the call that makes a value and its mask; by default its producer.
        kept: returns what is kept of a mask that a call makes.
    """

    def __init__(
        self,
        number_of: Callable[[Value], Any],
        made_by: Callable[[Value], Call | None] = lambda value: value.producer,
        kept: Callable[[Any, Call], Any] = lambda mask, call: mask,
    ) -> None:
        self.number_of, self.made_by, self.kept = number_of, made_by, kept
        self._masks: dict[Value, Any] = {}

    def of(self, value: Value) -> Any:
        """Returns the boolean mask of a value, or None."""
        call = self.made_by(value)
        if not value.masked or call is None:
            return None
        if value not in self._masks:
            values = flatten_values(call.outputs)
            masks = tf.nest.flatten(self._computed_by(call))
            masks = [mask if mask is None else self.kept(mask, call) for mask in masks]
            self._masks.update(itertools.zip_longest(values, masks[: len(values)]))
        return self._masks[value]

    def _computed_by(self, call: Call) -> Any:
        """Computes the masks of a call's outputs."""
        first = first_argument(call)
        masks = map_values(self.of, first)
        if call.kwargs.get("mask") is not None:
            masks = map_values(self.number_of, call.kwargs["mask"])
        known = {id(mask): mask for mask in tf.nest.flatten(masks) if mask is not None}
        if not known:
            masks = None
        if len(known) == 1 and isinstance(call.layer, _ELEMENTWISE):
            return next(iter(known.values()))
        return call.layer.compute_mask(map_values(self.number_of, first), masks)

    def attached(self, value: Value, number: Any) -> Any:
        """Returns a value's tensor with the value's mask attached, and no other."""
        mask = self.of(value)
        if get_keras_mask(number) is mask:
            return number
        number = tf.identity(number)
        set_keras_mask(number, mask)
        return number
