"""Completes an unknown input shape from the first layer's adapted Normalization."""

from __future__ import annotations

from typing import Any

from keras_qat.frontend.graph import clone
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.keras2.readability import check_readable

_Normalization = keras.layers.Normalization


def with_known_input(model: Any) -> Any:
    """Returns the model, or a copy whose input shape comes from its first Normalization.

    Keras knows no sizes of the input of a Sequential model without `keras.Input`. An adapted
    Normalization knows the sizes of the axes that it normalizes along.

    Raises:
        ValueError: if the model cannot be read, or another Normalization has an input of unknown
            size.
    """
    check_readable(model)
    unknown = [layer for layer in model._flatten_layers() if _sizes(layer)]
    if not unknown:
        return model
    if not isinstance(model, keras.Sequential) or unknown != [model.layers[0]]:
        raise ValueError(
            f"'{unknown[0].name}' normalizes along an axis of unknown size. Give the model an "
            f"input of known shape: keras.Input(shape), as the first layer of a Sequential model."
        )
    shape = list(model.input_shape)
    for axis, size in _sizes(model.layers[0]).items():
        shape[axis] = size
    inputs = keras.Input(batch_shape=shape, dtype=model.inputs[0].dtype, name=model.input_names[0])
    changes = [{"batch_input_shape": shape}] + [{}] * len(model.layers[1:])
    layers = [clone(layer, **more) for layer, more in zip(model.layers, changes, strict=True)]
    copy = keras.Sequential([inputs, *layers], name=model.name)
    copy.set_weights(model.get_weights())
    for layer in layers:
        layer.finalize_state()  # Normalization derives what it computes with from its weights.
    return copy


def _sizes(layer: Any) -> dict[int, int]:
    """Returns the sizes that a Normalization knows of axes whose size its input lacks."""
    if not isinstance(layer, _Normalization) or not layer.built or layer.axis is None:
        return {}
    shapes = [node.input_shapes for node in layer.inbound_nodes]
    return {
        axis: layer._build_input_shape[axis]
        for shape in shapes
        for axis in layer._keep_axis
        if shape[axis] is None
    }
