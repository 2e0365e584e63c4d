"""Lowers other classes of BatchNormalization, whose `call` ends in Keras' own.

Classes of users stop their statistics where a layer is frozen, as Keras 2 does by itself, or
always. Keras has two more: `SyncBatchNormalization`, and the one of TensorFlow 1.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.registry import is_listed


def replace_custom_batch_norm(call: Call, context: LoweringContext) -> list[Call]:
    """Replaces another class of BatchNormalization by Keras' own, if both learn the same.

    One that uses the moving statistics also in training is called with `training=False`.
    """
    layer, kind = call.layer, layers.BatchNormalization
    base = kind.__base__
    if not isinstance(layer, base) or is_listed(layer):
        return []
    count = 2 + layer.scale + layer.center
    if len(layer.weights) != count or len(call.inputs) > 1 or layer.activity_regularizer:
        return []
    sizes = [8 if size is None else size for size in call.inputs[0].shape]
    x = tf.constant(np.random.default_rng(0).normal(1.0, 2.0, sizes), layer.compute_dtype)
    config = base.get_config(layer)
    if getattr(layer, "synchronized", False):  # Which Keras omits.
        config["synchronized"] = True

    def make(**changes: Any) -> Any:
        return kind.from_config({**config, **changes})

    try:
        plain = make()
        plain.build(call.inputs[0].shape)
        plain.set_weights(layer.get_weights())
        own = [_results(layer, x, phase) for phase in (True, False)]
        known = [_results(plain, x, phase) for phase in (True, False)]
    except Exception:  # Whatever a user's own code may raise: it is opened, or says why not.
        return []
    if not _equal(own[1], known[1]):
        return []
    kwargs = dict(call.kwargs)
    if not _equal(own[0], known[0]):
        if not _equal(own[0], known[1]):
            return []
        kwargs["training"] = False
    parts = PartsBuilder(call, context)
    own_kind = parts.new("", make, weights=layer.weights)
    return parts.end(own_kind, *call.args[:1], kwargs=kwargs)


def _results(layer: Any, x: Any, training: bool) -> list[np.ndarray]:
    """Returns what a call gives, and the layer's weights behind it. The layer stays as it is."""
    eagerly = contextlib.nullcontext() if tf.executing_eagerly() else tf.init_scope()
    with eagerly:
        before = layer.get_weights()
        try:
            output = layer.call(x, training=training)
            return [output.numpy(), *layer.get_weights()]
        finally:
            layer.set_weights(before)


def _equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, a, b))
