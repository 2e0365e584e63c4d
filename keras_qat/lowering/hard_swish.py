"""Recognizes hard swish that a model computes with several operations."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, values_in
from keras_qat.graph.operations import kind_of
from keras_qat.graph.tf_operations import number
from keras_qat.helper_layers.operations import HardSwish
from keras_qat.keras2.backend import keras
from keras_qat.lowering.builder import LoweringContext


def recognize_hard_swish(graph: Graph, context: LoweringContext) -> Graph:
    """Replaces every x * relu6(x + 3) * 1/6 by one HardSwish layer."""
    matches = {call: _inside(call) for call in graph.calls}
    consumers = graph.consumers()
    outputs = set(values_in(graph.outputs))
    replaced: dict[Call, Call] = {}
    dropped: set[Call] = set()
    for call, (x, inner) in matches.items():
        members, hidden = {call, *inner}, {part.output for part in inner}
        if x is None or hidden & outputs or any(set(consumers[v]) - members for v in hidden):
            continue
        replaced[call] = context.pattern(call, HardSwish, x)
        dropped.update(inner)
    calls = [replaced.get(call, call) for call in graph.calls if call not in dropped]
    return dataclasses.replace(graph, calls=calls)


def _inside(call: Call) -> tuple[Value | None, list[Call]]:
    """Returns the input and the other calls of the hard swish that ends in `call`, or None."""
    sixth = _times_a_sixth(call)
    product = call if sixth is None else sixth.producer
    if product is None or _kind(product) != "multiply" or len(product.inputs) != 2:
        return None, []
    for x, gate in (product.inputs, product.inputs[::-1]):
        inner = [product]  # (x * relu6(x + 3)) / 6
        relu = gate.producer
        if relu and sixth is None:  # x * (relu6(x + 3) / 6)
            inner, clipped = [relu], _times_a_sixth(relu)
            relu = clipped.producer if clipped else None
        shift = relu.inputs[0].producer if relu and _kind(relu) == "relu6" else None
        if relu and shift and _with_constant(shift, "add", 3.0) is x:
            return x, [*inner, relu, shift]
    return None, []


def _kind(call: Call) -> str:
    layer = call.layer
    if type(layer) is keras.layers.Multiply:
        return "multiply"
    if type(layer) is keras.layers.ReLU:
        return "relu6" if layer.max_value == 6 else ""
    return kind_of(call)


def _with_constant(call: Call, kind: str, constant: float) -> Value | None:
    """Returns the tensor that `call` combines with a constant."""
    if _kind(call) != kind or len(call.inputs) != 1:
        return None
    arguments = map(number, tf.nest.flatten((call.args, call.kwargs)))
    numbers = [argument for argument in arguments if argument is not None]
    close = len(numbers) == 1 and abs(numbers[0] - constant) < 1e-6
    return call.inputs[0] if close else None


def _times_a_sixth(call: Call) -> Value | None:
    value = _with_constant(call, "multiply", 1 / 6)
    return value if value is not None else _with_constant(call, "divide", 6.0)
