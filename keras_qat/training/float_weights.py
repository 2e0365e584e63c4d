"""The weights of a float model that quantization will round."""

from __future__ import annotations

from typing import Any

from keras_qat.frontend.keras2.layers_and_models import layers_in
from keras_qat.ops.registry import row_listing
from keras_qat.training.layers.weight_quantizer import weight_at
from keras_qat.training.schedule import is_quantized


def weights_of(model: Any, names: list[str] | None = None) -> list[tuple[Any, tuple[int, ...]]]:
    """Returns the weights of a float model, each with the axes of its output channels.

    Args:
        model: the model, as `fit` trains it.
        names: names of layers; None for all.

    Raises:
        ValueError: if the model is quantized already, or has no such layers.
    """
    if is_quantized(model):
        raise ValueError(
            f"'{model.name}' is quantized already. Prune and cluster the float model, then "
            f"quantize it with a recipe that keeps this: recipes.int8().preserve('zeros')."
        )
    layers = {layer for layer in layers_in(model) if names is None or layer.name in names}
    weights = []
    for layer in layers_in(model):
        op = row_listing(layer) if layer in layers else None
        if op is not None and op.is_weighted and not op.is_table and not op.is_affine:
            weights += [(weight_at(layer, name), axes) for name, axes in op.weights.items()]
    unknown = sorted({*(names or ())} - {layer.name for layer in layers})
    if unknown or not weights:
        raise ValueError(
            f"'{model.name}' has no layer {' or '.join(map(repr, unknown))}."
            if unknown
            else f"'{model.name}' has no such layers with weights that are quantized."
        )
    return weights
