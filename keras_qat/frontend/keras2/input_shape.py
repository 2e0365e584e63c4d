"""Input shapes that a model was not told, but that its first layer knows."""

from __future__ import annotations

from typing import Any

from keras_qat.frontend.graph import clone
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.keras2.readability import check_readable

__all__ = ["with_known_input"]

_Normalization = keras.layers.Normalization


def with_known_input(model: Any) -> Any:
    """The model itself; a copy with its input's shape if it begins with an adapted Normalization.

    In a Sequential model without `keras.Input`, Keras knows no size of such a model's input. The
    layer knows those of the axes it normalizes along.

    Raises:
        ValueError: if it is no model that can be read, or if another Normalization does not know
            its input's shape.
    """
    check_readable(model)
    unknown = [each for each in model._flatten_layers() if _sizes(each)]
    if not unknown:
        return model
    if not isinstance(model, keras.Sequential) or unknown != [model.layers[0]]:
        raise ValueError(
            f"'{unknown[0].name}' normalizes along an axis of unknown size. Give the model an "
            f"input that has it: keras.Input(shape), as the first layer of a Sequential one."
        )
    shape = list(model.input_shape)
    for axis, size in _sizes(model.layers[0]).items():
        shape[axis] = size
    inputs = keras.Input(batch_shape=shape, dtype=model.inputs[0].dtype, name=model.input_names[0])
    changes = [{"batch_input_shape": shape}] + [{}] * len(model.layers[1:])
    layers = [clone(each, **more) for each, more in zip(model.layers, changes, strict=True)]
    copy = keras.Sequential([inputs, *layers], name=model.name)
    copy.set_weights(model.get_weights())
    for layer in layers:
        layer.finalize_state()  # Normalization computes with what it makes of its weights.
    return copy


def _sizes(layer: Any) -> dict[int, int]:
    """The sizes that a Normalization knows of axes that have none in its input."""
    if not isinstance(layer, _Normalization) or not layer.built or layer.axis is None:
        return {}
    shapes = [node.input_shapes for node in layer.inbound_nodes]
    return {
        axis: layer._build_input_shape[axis]
        for shape in shapes
        for axis in layer._keep_axis
        if shape[axis] is None
    }
