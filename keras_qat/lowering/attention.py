"""Splits attention into projections, products and a softmax, which have int8 operators."""

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
from keras_qat.lowering.expand_call import get_value, require
from keras_qat.lowering.mask_tensors import MaskTensors


def split_multi_head_attention(
    call: Call, context: LoweringContext, masks: MaskTensors | None = None
) -> list[Call]:
    """Split MultiHeadAttention into projections, products, masks and a softmax.

    For images, height and width are merged into one axis. `masks` computes the Keras masks.
    Returns [] if a call cannot be split, for example if the size of an image is unknown.
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
    visible: Any = steps if causal else None
    if mask is not None and not isinstance(mask, Value):
        constant = np.asarray(mask, bool)
        if constant.ndim > 2 and constant.shape[0] != 1:
            return []  # The mask differs between examples.
        constant = constant[0] if constant.ndim > 2 else constant
        visible, mask = constant & np.tri(*steps, dtype=bool) if causal else constant, None
    has_more_axes = len(details["axes"]) > 1 or len(query.shape) > 4
    if has_more_axes:
        is_plain = not (is_masked or with_scores or causal or mask is not None)
        has_others = len(details["axes"]) < len(query.shape) - 2
        if (
            has_others
            or not is_plain
            or None in (*query.shape[1:], *value.shape[1:], *key.shape[1:])
        ):
            return []
    if is_masked and masks is not None:
        if mask is not None and (mask.is_float or len(mask.shape) != 3):
            return []
        mask = masks.make_attention_mask(call, [query, value, key], mask)
    parts = PartsBuilder(call, context)
    last: list[layers.Layer] = []
    if has_more_axes:
        (query, value, key), restore = _merge_axes(parts, details, query, value, key)
        last.append(restore)
    if layer.activity_regularizer is not None:
        # This regularizer belongs to the entire layer. The projections have their own.
        last.append(parts.new("regularized", Regularize, layer.activity_regularizer))

    def project(name: str, source: Value, output: Value | None = None) -> Value:
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
    y = parts.add(product, [project("key", key), queries])
    if mask is not None or visible is not None:
        inputs = [y] if mask is None else [y, mask]
        y = parts.add(parts.new("mask", MaskScores, visible), inputs, shape=y.shape)
    y = parts.add(parts.new("softmax", layers.Softmax), y, output=scores)
    if details["dropout"]:
        y = parts.add(parts.new("dropout", layers.Dropout, details["dropout"]), y)
    combination = parts.new("values", Contract, details["combination"])
    y = parts.add(combination, [y, project("value", value)])
    y = project("output", y, None if last else result)
    for step in last:
        y = parts.add(step, y, output=result if step is last[-1] else None)
    return parts.calls


def _merge_axes(
    parts: PartsBuilder, details: dict[str, Any], *tensors: Value
) -> tuple[list[Value], layers.Layer]:
    """Reshape the inputs to [batch, steps, channels]. Change the options in `details` accordingly.

    Returns the new query, value and key, and a layer that restores the axes of the result.
    """
    merged: dict[Value, Value] = {}
    for name, x in zip(("query", "value", "key"), tensors, strict=True):
        if x not in merged:
            sizes = math.prod(size or 1 for size in x.shape[1:-1]), x.shape[-1]
            merged[x] = parts.add(parts.new(f"{name}_axes", layers.Reshape, sizes), x)
    details["product"], details["combination"] = "aecd,abcd->acbe", "acbe,aecd->abcd"
    dropped = string.ascii_lowercase[2 : len(tensors[0].shape) - 1]
    for name in ("query", "key", "value", "output"):
        config = details[name].get_config()
        details["changes"][name] = {
            "equation": config["equation"].translate(dict.fromkeys(map(ord, dropped))),
            "output_shape": config["output_shape"][len(dropped) :],
        }
    sizes = *tensors[0].shape[1:-1], *details["output"].kernel.shape[2:]
    return [merged[x] for x in tensors], parts.new("axes", layers.Reshape, sizes)


def split_masked_attention(call: Call, context: LoweringContext, masks: MaskTensors) -> list[Call]:
    if not any(value.masked for value in call.inputs):
        return []
    parts = split_multi_head_attention(call, context, masks)
    return [*masks.take_calls(), *(part.as_part_of(call) for part in parts)]


def expand_attention(
    layer: layers.Attention,
    inputs: list[tf.Tensor],
    mask: list[tf.Tensor | None] | None = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> tf.Tensor | list[tf.Tensor]:
    """Compute Attention without weights or masks as a product, a softmax and another product."""
    query, value, *key = inputs
    is_masked = any(m is not None for m in tf.nest.flatten(mask))
    require(not is_masked and not any(get_value(x).masked for x in inputs))
    require(not layer.use_scale and layer.score_mode == "dot")
    steps, more = (query.shape[-2], value.shape[-2]), "xyz"[: len(query.shape) - 3]
    weights = Contract(f"b{more}td,b{more}sd->b{more}ts", name="scores")([query, *(key or [value])])
    if use_causal_mask or layer.causal:
        require(None not in steps)
        weights = MaskScores(steps, name="mask")(weights)
    weights = layers.Softmax(name="softmax")(weights)
    if layer.dropout:
        weights = layers.Dropout(layer.dropout, name="dropout")(weights)
    result = Contract(f"b{more}ts,b{more}sd->b{more}td")([weights, value])
    return [result, weights] if return_attention_scores else result
