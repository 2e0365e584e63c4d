"""The weights of a float model that quantization will round."""

from __future__ import annotations

from typing import Any

from keras_qat.graph.calls import Value, flatten_values
from keras_qat.graph.facts import reach
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.keras2.readability import is_graph_model
from keras_qat.ops.registry import find_row
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
    layers = {layer for layer in list_layers(model) if names is None or layer.name in names}
    weights = []
    for layer in list_layers(model):
        if layer in layers:
            axes_of = _weight_axes(layer)
            weights += [(weight_at(layer, name), axes) for name, axes in axes_of.items()]
    unknown = sorted({*(names or ())} - {layer.name for layer in layers})
    if unknown or not weights:
        raise ValueError(
            f"'{model.name}' has no layer {' or '.join(map(repr, unknown))}."
            if unknown
            else f"'{model.name}' has no such layers with weights that are quantized."
        )
    return weights


def output_layers(model: Any) -> set[Any]:
    """Returns the layers whose channels are the model's outputs; none of a subclassed model."""
    if not is_graph_model(model):
        return set()

    def read_by_others(value: Value) -> list[Value]:
        """Return what a tensor is computed from, up to layers whose weights have channels."""
        call = value.producer
        return [] if call is None or _weight_axes(call.layer) else call.inputs

    values = reach(flatten_values(read_model(model).outputs), read_by_others)
    layers = [value.producer.layer for value in values if value.producer is not None]
    return {layer for layer in layers if _weight_axes(layer)}


def _weight_axes(layer: Any) -> dict[str, tuple[int, ...]]:
    """Returns the axes of output channels of each weight that is no table and no single factor."""
    op = find_row(layer)
    is_product = op is not None and op.is_weighted and not op.is_table and not op.is_affine
    return dict(op.weights) if op is not None and is_product else {}
