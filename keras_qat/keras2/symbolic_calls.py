"""Reads the layer calls that made symbolic tensors, without a model around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras

SymbolicTensor: Any = type(keras.Input((1,)))
"""Keras' class of symbolic tensors. One that is made directly is the output of no layer."""


def take_nodes(outputs: list[Any]) -> list[Any]:
    """Return Keras' nodes of the calls that outputs depend on, each after the nodes it reads.

    The layers forget these calls, so that they can be called in a model.
    """
    nodes = list(_find_nodes(outputs, set()))
    for layer in {id(node.layer): node.layer for node in nodes}.values():
        for known in (layer._inbound_nodes, layer._outbound_nodes):
            known[:] = [node for node in known if node not in nodes]
    return nodes


def _find_nodes(tensors: list[Any], seen: set[int]) -> Iterator[Any]:
    for tensor in tensors:
        if not isinstance(tensor, SymbolicTensor) or not hasattr(tensor, "_keras_history"):
            continue
        layer, index, _ = tensor._keras_history
        node = layer._inbound_nodes[index]
        if id(node) not in seen:
            seen.add(id(node))
            yield from _find_nodes(tf.nest.flatten((node.call_args, node.call_kwargs)), seen)
            yield node
