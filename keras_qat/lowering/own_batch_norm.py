"""Lowers a subclass of BatchNormalization whose `call` ends in Keras' own.

Such classes stop their statistics where a layer is frozen, as Keras 2 does by itself, or always.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder


def plain_batch_norm(call: Call, context: LoweringContext) -> list[Call]:
    """Replaces a user's subclass of BatchNormalization by Keras' own, if both learn the same.

    One that uses the moving statistics also in training is called with `training=False`.
    """
    layer, base = call.layer, layers.BatchNormalization
    if not isinstance(layer, base):
        return []
    count = 2 + layer.scale + layer.center
    if len(layer.weights) != count or len(call.inputs) > 1 or layer.activity_regularizer:
        return []
    sizes = [8 if size is None else size for size in call.inputs[0].shape]
    x = tf.constant(np.random.default_rng(0).normal(1.0, 2.0, sizes), layer.compute_dtype)
    try:
        own = [_results(layer, type(layer).call, x, phase) for phase in (True, False)]
        known = [_results(layer, base.call, x, phase) for phase in (True, False)]
    except Exception:  # Whatever a user's own code may raise: it is opened, or says why not.
        return []
    if not _equal(own[1], known[1]):
        return []
    kwargs = dict(call.kwargs)
    if not _equal(own[0], known[0]):
        if not _equal(own[0], known[1]):
            return []
        kwargs["training"] = False
    parts, config = PartsBuilder(call, context), base.get_config(layer)
    plain = parts.new(
        "", lambda **changes: base.from_config({**config, **changes}), weights=layer.weights
    )
    return parts.end(plain, *call.args[:1], kwargs=kwargs)


def _results(layer: Any, function: Any, x: Any, training: bool) -> list[np.ndarray]:
    """Returns what a call gives, and the layer's weights behind it. The layer stays as it is."""
    eagerly = contextlib.nullcontext() if tf.executing_eagerly() else tf.init_scope()
    with eagerly:
        before = layer.get_weights()
        try:
            output = function(layer, x, training=training)
            return [output.numpy(), *layer.get_weights()]
        finally:
            layer.set_weights(before)


def _equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, a, b))
