"""Reads a user's float model into the model and graph to quantize."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.frontend.graph import Graph, read
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.keras2.layers_and_models import clone
from keras_qat.frontend.keras2.precision import check_precision, float32_policy, in_float32
from keras_qat.frontend.keras2.readability import as_functional, check_readable
from keras_qat.frontend.known_sizes import with_known_sizes


def read_float(model: Any, inputs: Any = None, half: bool = True) -> tuple[Any, Graph]:
    """Returns the functional or Sequential Keras 2 model to quantize, and its graph.

    The model is the user's unless that is subclassed or does not know its input's shape.

    Args:
        model: the user's model.
        inputs: symbolic inputs for a subclassed model.
        half: whether the model may compute in half precision; else a float32 copy is used.

    Raises:
        ValueError: if the model cannot be read, holds float64, or reads weights outside of their
            layers.
    """
    model = as_functional(model, inputs)
    check_readable(model)
    model = _with_known_input(model if half else in_float32(model))
    with float32_policy():
        graph = with_known_sizes(read(model))
    check_precision(graph)
    _check_weights(graph)
    return model, graph


def _check_weights(graph: Graph) -> None:
    """Raises a `ValueError` if an operation reads a layer's weight, as in a tied embedding."""
    for call in graph.calls:
        for leaf in tf.nest.flatten((call.args, call.kwargs)):
            if isinstance(leaf, tf.Variable):
                raise ValueError(
                    f"'{call.name}' reads {leaf.name}, a weight of another layer, which Keras "
                    f"can neither copy nor save. Make one layer of your own of both: a class with "
                    f"the other layer as an attribute, and this operation in its call."
                )


def _with_known_input(model: Any) -> Any:
    """Returns the model, or a copy whose input shape comes from its first Normalization.

    Keras knows no sizes of the input of a Sequential model without `keras.Input`. An adapted
    Normalization knows the sizes of the axes that it normalizes along.

    Raises:
        ValueError: if another Normalization has an input of unknown size.
    """
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
    if not isinstance(layer, keras.layers.Normalization) or not layer.built or layer.axis is None:
        return {}
    shapes = [node.input_shapes for node in layer.inbound_nodes]
    return {
        axis: layer._build_input_shape[axis]
        for shape in shapes
        for axis in layer._keep_axis
        if shape[axis] is None
    }
