"""Weights, from layer to layer between a model of Keras 3 and the same in Keras 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_qat.keras2.graph import weights_in_order
from keras_qat.keras2.readable import check_readable
from keras_qat.keras3.backend import check_model, is_model
from keras_qat.rewrite import QuantizedModel
from keras_qat.strip import strip_quantization

__all__ = ["take_weights", "to_keras_3"]


def to_keras_3(model: Any, keras_3_model: Any) -> Any:
    """Gives a Keras 3 model the weights of a model that was made from it, or from an equal one.

    Args:
        model: what `from_keras_3` returned, or what `quantize_model` made of it or of the Keras 3
            model: then its weights are those of `strip_quantization(model)`.
        keras_3_model: the Keras 3 model. Its weights change, nothing else.

    Returns:
        The Keras 3 model.

    Raises:
        ValueError: if the models do not have the same layers with the same weights.

    Example:
        >>> qat = keras_qat.quantize_model(keras_3_model)
        >>> qat.fit(...)
        >>> keras_qat.to_keras_3(qat, keras_3_model).save("trained.keras")
    """
    check_model(keras_3_model)
    plain = strip_quantization(model) if isinstance(model, QuantizedModel) else model
    check_readable(plain)
    found = [pair for layers in _pairs(keras_3_model, plain) for pair in _weights(*layers)]
    for theirs, ours in found:
        theirs.assign(np.asarray(ours))
    for layer, _ in _pairs(keras_3_model, plain):
        _finalize(layer)
    return keras_3_model


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
