"""Order, numbers and identity of the nodes of a traced layer, by which two traces are compared."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import name_in_tensorflow
from keras_qat.keras2.backend import layers
from keras_qat.tracing.custom_gradients import OwnGradient

NOISE = {
    *(layers.Dropout, layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D),
    *(layers.AlphaDropout, layers.GaussianDropout, layers.GaussianNoise),
    *(layers.RandomFlip, layers.RandomRotation, layers.RandomZoom, layers.RandomTranslation),
    *(layers.RandomContrast, layers.RandomBrightness),
}
"""Layers that return their input but in training."""


def in_order(trace: Any) -> list[Any]:
    """Returns the nodes of a trace, those of a node's first argument before those of its second.

    Keras' order is another with a layer more in one branch.
    """
    made = {id(tensor): node for node in trace.nodes for tensor in tf.nest.flatten(node.outputs)}
    order: dict[Any, None] = {}
    waiting = [made[id(x)] for x in reversed(tf.nest.flatten(trace.outputs)) if id(x) in made]
    while waiting:
        arguments = tf.nest.flatten((waiting[-1].call_args, waiting[-1].call_kwargs))
        before = [made[id(x)] for x in reversed(arguments) if id(x) in made]
        if before := [node for node in before if node not in order]:
            waiting += before
        else:
            order[waiting.pop()] = None
    return list(order)


def numbered(trace: Any, noise: set[Any]) -> dict[int, int]:
    """Counts the tensors of a trace, by id; the output of `noise` has the number of its input."""
    numbers = {id(tensor): index for index, tensor in enumerate(trace.model.inputs)}
    count = len(numbers)
    for node in in_order(trace):
        outputs = tf.nest.flatten(node.outputs)
        if node in noise:
            numbers[id(outputs[0])] = numbers[id(node.call_args[0])]
            continue
        numbers.update((id(tensor), count + index) for index, tensor in enumerate(outputs))
        count += len(outputs)
    return numbers


def identity(node: Any) -> Any:
    """Identifies what a node computes with.

    Layers without weights, such as `keras.layers.add` or a user's function makes anew, are equal by
    configuration.
    """
    layer = node.layer
    if name := name_in_tensorflow(layer):
        return type(layer), name
    if isinstance(layer, OwnGradient):
        return type(layer), layer.operations()
    with contextlib.suppress(NotImplementedError):  # A class without `get_config`.
        if not layer.weights:
            return type(layer), {**layer.get_config(), "name": ""}
    return layer


def equal(a: Any, b: Any) -> bool:
    if tf.is_tensor(a) or isinstance(a, np.ndarray):
        x, y = np.asarray(a), np.asarray(b)
        return x.shape == y.shape and bool(np.all((x == y) | ((x != x) & (y != y))))  # NaN.
    return bool(a is b or a == b)
