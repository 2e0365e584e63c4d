"""Masking of another number than 0, which no quantized value need be."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import operation_class
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.mask_tensors import MaskTensors


def finds_number(call: Call) -> bool:
    """Returns whether a call is a Masking of another number than 0."""
    return type(call.layer) is layers.Masking and call.layer.mask_value != 0


def reads_floats(
    call: Call, readers: Mapping[Value, list[Call]], outputs: Collection[Value]
) -> bool:
    """Returns whether a Masking alone reads what is in front of it, from the model's inputs on.

    It can find its number in float then, in front of the quantizer.
    """
    before, values = {call}, list(call.inputs)
    for value in values:  # It grows.
        maker = value.producer
        known = readers.get(value, [])  # None inside of a layer that was opened.
        others = [other for other in known if other not in before]
        if value in outputs or not known or not all(map(finds_number, others)):
            return False
        if maker is not None:
            if maker.layer.weights:
                return False
            before.add(maker)
            values += maker.inputs
    return True


def split_masking(call: Call, context: LoweringContext, masks: MaskTensors) -> list[Call]:
    """Lowers a Masking to comparisons with its number, and a choice between values and 0.

    Raises:
        CannotTrace: if its mask cannot be traced.
    """
    (x,), y, parts = call.inputs, call.output, PartsBuilder(call, context)
    mask, operation = masks.of([y])[y], operation_class()
    steps = Value(f"{y.name}_steps", (*mask.shape, 1), mask.dtype)
    parts.add(parts.new("steps", operation, tf.expand_dims), mask, -1, output=steps)
    parts.end(parts.new("", operation, tf.where), steps, x, 0.0)
    return [*masks.take_calls(), *(part.as_part_of(call) for part in parts.calls)]
