"""Finds the layers that run a user's own code: they are opened."""

from __future__ import annotations

import contextlib
from typing import Any

from keras_qat.graph.operations import is_operation
from keras_qat.graph.read_model import read_model
from keras_qat.imports.read_float import ReadsWeight
from keras_qat.keras2.backend import layers
from keras_qat.keras2.configurations import can_find_activation
from keras_qat.keras2.readability import is_graph_model
from keras_qat.lowering.activations import ACTIVATIONS
from keras_qat.lowering.mask_tensors import is_recurrent
from keras_qat.lowering.unrolling import CELLS
from keras_qat.messages import KERAS, KNOWN, get_package
from keras_qat.ops.registry import is_listed, is_listed_function, is_registered
from keras_qat.tracing.whole_graph import WholeGraph

ATTENTION = layers.Attention, layers.AdditiveAttention
"""Keras' layers that are opened. Users are not told to describe one that cannot be."""

_SEPARABLE = layers.SeparableConv1D, layers.SeparableConv2D
"""Keras' layers that no row lists, of which activations are split off."""


def runs_custom_code(layer: Any) -> bool:
    """Returns whether a layer runs a user's own code, or Keras' own that no lowering splits."""
    if type(layer) in ATTENTION:
        return type(layer) is layers.AdditiveAttention or bool(layer.weights)
    if is_registered(layer) or is_operation(layer):
        return False
    if type(layer) is layers.TimeDistributed:
        inner = layer.layer
        parts = read_model(inner).calls if is_graph_model(inner) else None
        inner_layers = [call.layer for call in parts] if parts else [inner]
        return any(runs_custom_code(part) or has_custom_activation(part) for part in inner_layers)
    if type(layer) is layers.Activation:
        inner = layer.activation
        return runs_custom_code(inner) if isinstance(inner, layers.Layer) else not _is_known(inner)
    if type(layer) in (layers.Lambda, ReadsWeight, WholeGraph, *CELLS):
        return True
    return get_package(type(layer)) not in KNOWN


def _is_known(function: Any) -> bool:
    """Returns whether an activation function has a row or a lowering, and is saved as it is."""
    if get_package(function) == "tensorflow" and not can_find_activation(function):
        return False
    with contextlib.suppress(TypeError):  # Not everything that can be called has a hash.
        return function in ACTIVATIONS or is_listed_function(function)
    return False


def has_custom_activation(layer: Any) -> bool:
    """Returns whether a Keras layer other than a recurrent one has an activation of a user."""
    function = getattr(layer, "activation", None)
    is_split = is_listed(layer) or isinstance(layer, _SEPARABLE)
    if is_registered(layer) or is_recurrent(layer) or not (is_split and callable(function)):
        return False
    if isinstance(function, layers.Layer):
        return runs_custom_code(function)
    package = get_package(function)
    return package not in KERAS and not (package == "tensorflow" and _is_known(function))
