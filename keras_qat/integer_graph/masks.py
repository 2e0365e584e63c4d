"""What the masks of layers in float are computed from, as integer tensors carry no masks."""

from __future__ import annotations

from typing import Any

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.graph.masks import first_argument
from keras_qat.keras2.backend import keras
from keras_qat.training.layers import Quantize, QuantizeWeights, QuantizeWrapper


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
        first = flatten_values(first_argument(producer))
        if _reads_inputs(producer.layer):
            read.update(dict.fromkeys(first))
        mask = producer.kwargs.get("mask")
        read.update(dict.fromkeys(flatten_values(mask)))
        pending += [value.producer for value in first if value.masked]
    return list(read)


def _reads_inputs(layer: Any) -> bool:
    """Whether a layer's mask depends on more than its inputs' masks."""
    while isinstance(layer, (QuantizeWrapper, QuantizeWeights)):
        layer = layer.layer
    method = type(layer).compute_mask
    return not isinstance(layer, Quantize) and method is not keras.layers.Layer.compute_mask
