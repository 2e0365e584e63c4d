"""Lowering of attention into projections, products and a softmax, which have int8 kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.inner_layers import Contract, Regularize
from keras_qat.keras2 import graph as graph_lib
from keras_qat.keras2.backend import attention_parts, keras
from keras_qat.keras2.graph import Call, Value
from keras_qat.lower.parts import Made, between, path
from keras_qat.operations import operands

__all__ = ["split_attention", "split_einsum", "split_multi_head_attention"]

_layers = keras.layers


def split_multi_head_attention(call: Call, made: Made) -> list[Call]:
    """MultiHeadAttention -> projections, Rescaling, product, softmax, product, projection.

    With a mask, or over several axes at once, it stays one layer: its softmax has no int8 kernel.
    """
    layer = call.layer
    query, value, key, mask, with_scores, _, causal = operands(
        call,
        "query",
        "value",
        "key",
        "attention_mask",
        "return_attention_scores",
        "training",
        "use_causal_mask",
    )
    key = value if key is None else key
    parts = attention_parts(layer)
    is_masked = mask is not None or causal or any(each.masked for each in (query, value, key))
    if is_masked or parts is None:
        return []
    calls: list[Call] = []

    def add(new: Any, *inputs: Value, output: Any = None, sized: Any = None) -> Value:
        if output is None:
            shapes = [each.shape for each in inputs]
            shape = (sized or new).compute_output_shape(shapes if len(shapes) > 1 else shapes[0])
            output = between(call, new, shape)
        argument = list(inputs) if len(inputs) > 1 else inputs[0]
        calls.append(Call(new, (argument,), {}, output, path(call, new)))
        return output

    def part(name: str, make: Any, *args: Any, weights: Any = (), **kwargs: Any) -> Any:
        full_name = layer.name if name == "output" else f"{layer.name}_{name}"
        return made.layer(layer, name, partial(make, *args, name=full_name, **kwargs), weights)

    def project(name: str, source: Value, output: Any = None) -> Value:
        dense = parts[name]
        trainable = layer.trainable and dense.trainable
        new = part(name, graph_lib.clone, dense, weights=dense.weights, trainable=trainable)
        return add(new, source, output=output, sized=dense)

    result, scores = call.outputs if with_scores else (call.output, None)
    queries = add(part("scale", _layers.Rescaling, parts["scale"]), project("query", query))
    products = add(part("scores", Contract, parts["product"]), project("key", key), queries)
    weights = add(part("softmax", _layers.Softmax), products, output=scores)
    if parts["dropout"]:
        weights = add(part("dropout", _layers.Dropout, parts["dropout"]), weights)
    mixed = add(part("values", Contract, parts["combination"]), weights, project("value", value))
    if layer.activity_regularizer is not None:  # That of each projection, and of the whole.
        add(
            part("regularized", Regularize, layer.activity_regularizer),
            project("output", mixed),
            output=result,
        )
    else:
        project("output", mixed, result)
    return calls


def split_attention(call: Call, made: Made) -> list[Call]:
    """Attention -> product, softmax, product. With a mask, or weights in it, it stays one layer."""
    layer = call.layer
    names = ("inputs", "mask", "training", "return_attention_scores", "use_causal_mask")
    (query, value, *key), mask, _, with_scores, causal = operands(call, *names)
    given = [each for each in tf.nest.flatten(mask) if each is not None]
    is_masked = given or causal or any(each.masked for each in (query, value, *key))
    if is_masked or layer.use_scale or layer.score_mode != "dot":
        return []
    result, scores = call.outputs if with_scores else (call.output, None)

    def part(name: str, make: Any, *args: Any) -> Any:
        return made.layer(layer, name, partial(make, *args, name=f"{layer.name}_{name}"))

    steps = [part("scores", Contract, "btd,bsd->bts"), part("softmax", _layers.Softmax)]
    if layer.dropout:
        steps.append(part("dropout", _layers.Dropout, layer.dropout))
    argument: Any = [query, *(key or [value])]
    calls = []
    for step in steps:
        shape = (*query.shape[:2], value.shape[1])
        weights = scores if scores and step is steps[-1] else between(call, step, shape)
        calls.append(Call(step, (argument,), {}, weights, path(call, step)))
        argument = weights
    mix = made.layer(layer, "mix", partial(Contract, "bts,bsd->btd", name=layer.name))
    return [*calls, Call(mix, ([argument, value],), {}, result, call.name)]


def split_einsum(call: Call, made: Made) -> list[Call]:
    """tf.einsum of two tensors -> Contract."""
    equation, *tensors = tf.nest.flatten((call.args, call.kwargs))
    if len(call.inputs) != 2 or len(tensors) != 2 or not isinstance(equation, str):
        return []
    layer = made.layer(call.layer, "contract", lambda: Contract(equation, name=call.layer.name))
    return [Call(layer, (call.inputs,), {}, call.output, call.name)]
