"""Copies weights between a model of Keras 3 and its Keras 2 counterpart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_qat.imports.keras3.backend import is_model
from keras_qat.keras2.layers_and_models import list_weights


def give_weights(model: Any, keras_3_model: Any) -> None:
    """Copies a Keras 2 model's weights to the Keras 3 model that it was made from."""
    layers = list(_pairs(keras_3_model, model))
    weights = [pair for pair_of_layers in layers for pair in _weights(*pair_of_layers)]
    for target, source in weights:
        target.assign(np.asarray(source))
    for layer, _ in layers:
        _finalize(layer)


def take_weights(model: Any, keras_3_model: Any) -> None:
    """Copies the weights and `trainable` flags of a Keras 3 model to its Keras 2 counterpart."""
    for layer, converted in _pairs(keras_3_model, model):
        if converted.trainable != layer.trainable:
            converted.trainable = layer.trainable
        for source, target in _weights(layer, converted):
            target.assign(np.asarray(source))
        _finalize(converted)


def _pairs(source: Any, converted: Any) -> Iterator[tuple[Any, Any]]:
    """Yields layers of Keras 3 with their Keras 2 counterparts, models before their layers."""
    yield source, converted
    if not is_model(source):
        return
    counterparts = {layer.name: layer for layer in converted.layers}
    for layer in source.layers:
        counterpart = counterparts.get(layer.name)
        inner = getattr(layer, "layer", None)
        if counterpart is None and layer.weights:
            raise ValueError(
                f"'{converted.name}' lacks the layer '{layer.name}' of '{source.name}'."
            )
        if counterpart is not None and is_model(inner):  # In a TimeDistributed.
            yield layer, counterpart
            yield from _pairs(inner, counterpart.layer)
        elif counterpart is not None:
            yield from _pairs(layer, counterpart)


def _weights(source: Any, converted: Any) -> list[tuple[Any, Any]]:
    """Pairs the weights of a layer of Keras 3 with its counterpart's; none for models."""
    if is_model(source) or is_model(getattr(source, "layer", None)):
        return []
    pair = source.weights, list_weights(converted)
    shapes = [[tuple(weight.shape) for weight in weights] for weights in pair]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The weights of layer '{source.name}' have the shapes {shapes[0]} in Keras 3 and "
            f"{shapes[1]} in Keras 2."
        )
    return list(zip(*pair, strict=True))


def _finalize(layer: Any) -> None:
    """Makes a Normalization update what it derives from its weights."""
    if hasattr(layer, "finalize_state"):
        layer.finalize_state()
