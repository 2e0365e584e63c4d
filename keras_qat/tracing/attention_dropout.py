"""Traces the dropout of Keras' attention."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import layers, swap_attributes

_dropouts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Attention layer -> its dropout, the same in all of its calls."""


def trace_attention_dropout(layer: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a block in which Keras' attention drops weights with a layer, which can be traced."""
    if type(layer) not in (layers.Attention, layers.AdditiveAttention) or not layer.dropout:
        return contextlib.nullcontext()
    if layer not in _dropouts:
        _dropouts[layer] = layers.Dropout(layer.dropout, name="dropout")
    apply, drop = layer._apply_scores, _dropouts[layer]

    def apply_scores(scores: Any, value: Any, **options: Any) -> Any:
        weights = drop(apply(scores, value, **options)[1])
        return tf.matmul(weights, value), weights

    return swap_attributes(layer, dropout=0.0, _apply_scores=apply_scores)
