"""Lowers attention to projections, products and a softmax, which have int8 operators."""

from __future__ import annotations

import math
import string
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import get_operands
from keras_qat.helper_layers.operations import Contract, MaskScores, Regularize
from keras_qat.keras2.backend import get_attention_components, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.mask_tensors import MaskTensors
from keras_qat.tracing.cannot_trace import CannotTrace


def split_multi_head_attention(
    call: Call, context: LoweringContext, masks: MaskTensors | None = None
) -> list[Call]:
    """Lowers MultiHeadAttention to projections, products, masks and a softmax.

    Several axes that it attends over become one, as do several that it leaves. It stays whole where
    these have unknown sizes, a mask or scores, or if its inputs carry masks, but none are given.

    Args:
        call: the call.
        context: keeps the layers that are made.
        masks: the masks of the graph.
    """
    layer = call.layer
    names = ("query", "value", "key", "attention_mask", "return_attention_scores")
    query, value, key, mask, with_scores, causal = get_operands(call, *names, "use_causal_mask")
    key = value if key is None else key
    details = {**get_attention_components(layer), "changes": {}}
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
    are_several = len(details["axes"]) > 1 or len(query.shape) > 4
    if are_several:
        is_plain = not (is_masked or with_scores or causal or mask is not None)
        if not is_plain or None in (*query.shape[1:], *value.shape[1:], *key.shape[1:]):
            return []
    if is_masked and masks is not None:
        if mask is not None and (mask.is_float or len(mask.shape) != 3):
            return []
        mask = masks.of_attention(call, [query, value, key], mask)
    parts = PartsBuilder(call, context)
    last: list[Any] = []
    if are_several:
        query, value, key, last = _with_axes_as_one(parts, details, query, value, key)
    if layer.activity_regularizer is not None:
        # The projections keep their regularizers; this one is for the whole layer.
        last.append(parts.new("regularized", Regularize, layer.activity_regularizer))

    def project(name: str, source: Value, output: Any = None) -> Value:
        dense, changes = details[name], details["changes"].get(name, {})
        trainable = layer.trainable and dense.trainable
        options = {"weights": dense.weights, "trainable": trainable, **changes}
        part = parts.new("" if name == "output" else name, clone, dense, **options)
        summed = 2 if name == "output" else 1
        shape = (*source.shape[:-summed], *dense.kernel.shape[summed:])
        return parts.add(part, source, output=output, shape=shape)

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
    y = project("output", mixed, None if last else result)
    for step in last:
        y = parts.add(step, y, output=result if step is last[-1] else None)
    return parts.calls


def _with_axes_as_one(
    parts: PartsBuilder, details: dict[str, Any], *tensors: Value
) -> tuple[Any, ...]:
    """Makes one axis of those that a MultiHeadAttention attends over, and one of those it leaves.

    Args:
        parts: gets the calls.
        details: the parts of the layer, of which equations change.
        tensors: query, value and key.

    Returns:
        These three, and layers that give the result its axes again.
    """
    rank = len(tensors[0].shape)
    axes = details["axes"]
    others = tuple(axis for axis in range(1, rank - 1) if axis not in axes)
    order = (*others, *axes)
    back = tuple(order.index(axis) + 1 for axis in range(1, rank - 1))
    is_ordered = order == tuple(range(1, rank - 1))
    joined: dict[int, Value] = {}
    for name, x in zip(("query", "value", "key"), tensors, strict=True):
        if id(x) in joined:
            continue
        y = x
        if not is_ordered:
            y = parts.add(parts.new(f"{name}_order", layers.Permute, (*order, rank - 1)), y)
        size = [
            math.prod(x.shape[axis] or 1 for axis in group) for group in (others, axes) if group
        ]
        shape = (*size, x.shape[-1])
        joined[id(x)] = parts.add(parts.new(f"{name}_axes", layers.Reshape, shape), y)
    left = "f" * bool(others)
    details["product"] = f"a{left}ecd,a{left}bcd->a{left}cbe"
    details["combination"] = f"a{left}cbe,a{left}ecd->a{left}bcd"
    dropped = string.ascii_lowercase[2 + len(left) : rank - 1]
    for name in ("query", "key", "value", "output"):
        config = details[name].get_config()
        details["changes"][name] = {
            "equation": config["equation"].translate(dict.fromkeys(map(ord, dropped))),
            "output_shape": config["output_shape"][len(dropped) :],
        }
    made = details["output"].kernel.shape[2:]
    sizes = (*(tensors[0].shape[axis] for axis in order), *made)
    last = [parts.new("axes", layers.Reshape, sizes)]
    if not is_ordered:
        kept = range(rank - 1, rank - 1 + len(made))
        last.append(parts.new("order", layers.Permute, (*back, *kept)))
    return *(joined[id(x)] for x in tensors), last


def split_masked_attention(call: Call, context: LoweringContext, masks: MaskTensors) -> list[Call]:
    """Lowers a MultiHeadAttention with masks from Keras, which no later lowering knows."""
    if not any(value.masked for value in call.inputs):
        return []
    try:
        parts = split_multi_head_attention(call, context, masks)
    except CannotTrace:
        return []
    return [*masks.take_calls(), *(part.as_part_of(call) for part in parts)]


def split_attention(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers Attention to product, softmax and product, unless it has masks.

    One with weights was opened before.
    """
    layer = call.layer
    names = ("inputs", "mask", "return_attention_scores", "use_causal_mask")
    (query, value, *key), mask, with_scores, causal = get_operands(call, *names)
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
