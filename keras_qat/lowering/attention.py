"""Lowers attention to projections, products and a softmax, which have int8 operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call, Value
from keras_qat.frontend.helper_layers import Contract, MaskScores, Regularize
from keras_qat.frontend.keras2.backend import attention_parts, layers
from keras_qat.frontend.keras2.layers_and_models import clone
from keras_qat.frontend.keras2.trace_layer import CannotOpen
from keras_qat.frontend.tf_operations import operands
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, replace_by
from keras_qat.lowering.mask_tensors import MaskTensors


def split_multi_head_attention(
    call: Call, context: LoweringContext, masks: MaskTensors | None = None
) -> list[Call]:
    """Lowers MultiHeadAttention to projections, products, masks and a softmax.

    Several axes become one, between the projections. It stays whole with some of several axes or a
    mask or scores of several, or if its inputs carry masks, but none are given.

    Args:
        call: the call.
        context: keeps the layers that are made.
        masks: the masks of the graph.
    """
    layer = call.layer
    names = ("query", "value", "key", "attention_mask", "return_attention_scores", "training")
    query, value, key, mask, with_scores, _, causal = operands(call, *names, "use_causal_mask")
    key = value if key is None else key
    details = attention_parts(layer)
    steps = (query.shape[1], value.shape[1])
    is_masked = any(x.masked for x in (query, value, key))
    if (is_masked and masks is None) or (causal and None in steps):
        return []
    hidden: Any = steps if causal else None
    if mask is not None and not isinstance(mask, Value):
        visible = np.asarray(mask, bool)
        if visible.ndim > 2 and visible.shape[0] != 1:
            return []  # One for each of several examples.
        visible = visible[0] if visible.ndim > 2 else visible
        hidden, mask = visible & np.tri(*steps, dtype=bool) if causal else visible, None
    inner, are_several = query.shape[1:-1], len(details["axes"]) > 1
    if are_several:
        is_plain = not (is_masked or with_scores or causal or mask is not None)
        are_all = details["axes"] == tuple(range(1, len(query.shape) - 1))
        if not (is_plain and are_all) or None in (*inner, *value.shape[1:-1]):
            return []
        details |= {"product": "aecd,abcd->acbe", "combination": "acbe,aecd->abcd"}
    if is_masked and masks is not None:
        if mask is not None and (mask.is_float or len(mask.shape) != 3):
            return []
        mask = masks.of_attention(call, [query, value, key], mask)
    parts = PartsBuilder(call, context)

    def project(name: str, source: Value, output: Any = None) -> Value:
        dense = details[name]
        trainable = layer.trainable and dense.trainable
        options = {"weights": dense.weights, "trainable": trainable}
        part = parts.new("" if name == "output" else name, clone, dense, **options)
        kept = len(source.shape) - (2 if name == "output" else 1)
        sizes = tuple(dense.compute_output_shape(source.shape)[kept:])
        y = parts.add(part, source, output=output, shape=(*source.shape[:kept], *sizes))
        if not are_several or name == "output":
            return y
        return parts.add(parts.new(f"{name}_axes", layers.Reshape, (-1, *sizes)), y)

    result, scores = call.outputs if with_scores else (call.output, None)
    scale = parts.new("scale", layers.Rescaling, details["scale"])
    queries = parts.add(scale, project("query", query))
    product = parts.new("scores", Contract, details["product"])
    products = parts.add(product, [project("key", key), queries])
    if mask is not None or hidden is not None:
        hide = parts.new("mask", MaskScores, hidden)
        products = parts.add(
            hide, [products, *([] if mask is None else [mask])], shape=products.shape
        )
    weights = parts.add(parts.new("softmax", layers.Softmax), products, output=scores)
    if details["dropout"]:
        weights = parts.add(parts.new("dropout", layers.Dropout, details["dropout"]), weights)
    combination = parts.new("values", Contract, details["combination"])
    mixed = parts.add(combination, [weights, project("value", value)])
    if are_several:
        sizes = (*inner, *mixed.shape[-2:])
        mixed = parts.add(parts.new("axes", layers.Reshape, sizes), mixed)
    if layer.activity_regularizer is None:
        project("output", mixed, result)
    else:  # The projections keep their regularizers; this one is for the whole layer.
        regularized = parts.new("regularized", Regularize, layer.activity_regularizer)
        parts.add(regularized, project("output", mixed), output=result)
    return parts.calls


def split_masked_attention(call: Call, context: LoweringContext, masks: MaskTensors) -> list[Call]:
    """Lowers a MultiHeadAttention with masks from Keras, which no later lowering knows."""
    if not any(value.masked for value in call.inputs):
        return []
    try:
        parts = split_multi_head_attention(call, context, masks)
    except CannotOpen:
        return []
    return [*masks.take_calls(), *(part.as_part_of(call) for part in parts)]


def split_attention(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers Attention to product, softmax and product, unless it has masks.

    One with weights was opened before.
    """
    layer = call.layer
    names = ("inputs", "mask", "training", "return_attention_scores", "use_causal_mask")
    (query, value, *key), mask, _, with_scores, causal = operands(call, *names)
    masks = [m for m in tf.nest.flatten(mask) if m is not None]
    is_masked = masks or any(x.masked for x in (query, value, *key))
    size, more = (query.shape[-2], value.shape[-2]), "xyz"[: len(query.shape) - 3]
    causal = causal or layer.causal
    if is_masked or (causal and None in size) or layer.use_scale or layer.score_mode != "dot":
        return []
    result, scores = call.outputs if with_scores else (call.output, None)

    parts = PartsBuilder(call, context)
    steps = [
        parts.new("scores", Contract, f"b{more}td,b{more}sd->b{more}ts"),
        *([parts.new("mask", MaskScores, size)] if causal else []),
        parts.new("softmax", layers.Softmax),
        *([parts.new("dropout", layers.Dropout, layer.dropout)] if layer.dropout else []),
    ]
    weights: Any = [query, *(key or [value])]
    shape = (*query.shape[:-1], size[1])
    for step in steps:
        output = scores if step is steps[-1] else None
        weights = parts.add(step, weights, shape=shape, output=output)
    mix = parts.new("", Contract, f"b{more}ts,b{more}sd->b{more}td")
    parts.add(mix, [weights, value], output=result)
    return parts.calls


def split_einsum(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.einsum of two tensors to Contract."""
    equation, *tensors = tf.nest.flatten((call.args, call.kwargs))
    if len(call.inputs) != 2 or len(tensors) != 2 or not isinstance(equation, str):
        return []
    return replace_by(call, context, Contract, equation, inputs=call.inputs)
