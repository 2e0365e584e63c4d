"""Weights, from layer to layer between a model of Keras 3 and the same in Keras 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_qat.frontend.graph import weights_in_order
from keras_qat.frontend.keras3.backend import is_model

__all__ = ["give_weights", "take_weights"]


def give_weights(model: Any, keras_3_model: Any) -> None:
    """Gives a Keras 3 model the weights of a Keras 2 model that was made from it."""
    layers = list(_pairs(keras_3_model, model))
    weights = [pair for pair_of_layers in layers for pair in _weights(*pair_of_layers)]
    for theirs, ours in weights:
        theirs.assign(np.asarray(ours))
    for layer, _ in layers:
        _finalize(layer)


def take_weights(model: Any, keras_3_model: Any) -> None:
    """Gives a Keras 2 model the weights and the `trainable` flags of the Keras 3 model it is of."""
    for layer, made in _pairs(keras_3_model, model):
        if made.trainable != layer.trainable:
            made.trainable = layer.trainable
        for theirs, ours in _weights(layer, made):
            ours.assign(np.asarray(theirs))
        _finalize(made)


def _pairs(theirs: Any, ours: Any) -> Iterator[tuple[Any, Any]]:
    """Layers of Keras 3 and those of Keras 2 that stand for them: models before what is in them."""
    yield theirs, ours
    if not is_model(theirs):
        return
    there = {layer.name: layer for layer in ours.layers}
    for layer in theirs.layers:
        made = there.get(layer.name)
        inner = getattr(layer, "layer", None)
        if made is None and layer.weights:
            raise ValueError(f"'{ours.name}' has no layer '{layer.name}', as '{theirs.name}' has.")
        if made is not None and is_model(inner):  # In a TimeDistributed.
            yield layer, made
            yield from _pairs(inner, made.layer)
        elif made is not None:
            yield from _pairs(layer, made)


def _weights(theirs: Any, ours: Any) -> list[tuple[Any, Any]]:
    """The weights of a layer of Keras 3 beside those of the layer of Keras 2; none of models."""
    if is_model(theirs) or is_model(getattr(theirs, "layer", None)):
        return []
    pair = theirs.weights, weights_in_order(ours)
    shapes = [[tuple(each.shape) for each in weights] for weights in pair]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The weights of layer '{theirs.name}' have the shapes {shapes[0]} in Keras 3 and "
            f"{shapes[1]} in Keras 2."
        )
    return list(zip(*pair, strict=True))


def _finalize(layer: Any) -> None:
    """Lets a Normalization compute with its weights: it computes with what it makes of them."""
    if hasattr(layer, "finalize_state"):
        layer.finalize_state()
