"""Hard swish: the activation that models spell in operations and runtimes compute in one."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras, register
from keras_qat.keras2.graph import Call, Graph, Value, values_in
from keras_qat.operations import number

__all__ = ["HardSwish", "recognize_hard_swish"]


@register
class HardSwish(keras.layers.Layer):
    """x * relu6(x + 3) / 6, in the spelling that TFLite's converter takes for its operation.

    Shapes: any; the output has the input's shape.
    """

    def call(self, inputs: Any) -> Any:
        return inputs * tf.nn.relu6(inputs + 3.0) * (1.0 / 6.0)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


def recognize_hard_swish(graph: Graph) -> Graph:
    """`graph` with every x * relu6(x + 3) * 1/6 that is spelled in operations as one layer."""
    consumers = graph.consumers()
    outputs = set(values_in(graph.outputs))
    replaced: dict[Call, Call] = {}
    dropped: set[Call] = set()
    for call in graph.calls:
        found = _inside(call)
        if found is None:
            continue
        x, inner = found
        hidden = [each.output for each in inner]
        members = {call, *inner}
        if any(value in outputs or set(consumers[value]) - members for value in hidden):
            continue
        replaced[call] = Call(HardSwish(name=call.layer.name), (x,), {}, call.outputs, call.name)
        dropped.update(inner)
    calls = [replaced.get(call, call) for call in graph.calls if call not in dropped]
    return dataclasses.replace(graph, calls=calls)


def _inside(call: Call) -> tuple[Value, list[Call]] | None:
    """The input of the hard swish that `call` ends and the calls inside, or None."""
    pair = _operands(call, "multiply")
    if pair is not None:  # x * (relu6(x + 3) / 6)
        for x, gate in (pair, pair[::-1]):
            sixth = gate.producer and _times_a_sixth(gate.producer)
            if sixth and _is_shifted_relu6(sixth, x):
                return x, [gate.producer, *_shifted_relu6(sixth)]  # type: ignore[list-item]
    product = _times_a_sixth(call)  # (x * relu6(x + 3)) / 6
    pair = _operands(product.producer, "multiply") if product and product.producer else None
    if product is not None and pair is not None:
        for x, gate in (pair, pair[::-1]):
            if _is_shifted_relu6(gate, x):
                return x, [product.producer, *_shifted_relu6(gate)]  # type: ignore[list-item]
    return None


def _symbol(call: Call) -> str:
    if type(call.layer) is keras.layers.Multiply:
        return "multiply"
    symbol = getattr(call.layer, "symbol", "")
    return {
        "math.multiply": "multiply",
        "__operators__.mul": "multiply",
        "math.divide": "divide",
        "math.truediv": "divide",
        "__operators__.truediv": "divide",
        "math.add": "add",
        "__operators__.add": "add",
        "nn.relu6": "relu6",
    }.get(str(symbol), "")


def _operands(call: Call, symbol: str) -> tuple[Value, Value] | None:
    """The two tensors of a multiplication."""
    values = call.inputs
    return (values[0], values[1]) if _symbol(call) == symbol and len(values) == 2 else None


def _with_constant(call: Call, symbol: str, constant: float) -> Value | None:
    """The tensor that `call` combines with a constant."""
    if _symbol(call) != symbol or len(call.inputs) != 1:
        return None
    found = map(number, tf.nest.flatten((call.args, call.kwargs)))
    numbers = [each for each in found if each is not None]
    close = len(numbers) == 1 and abs(numbers[0] - constant) < 1e-6
    return call.inputs[0] if close else None


def _times_a_sixth(call: Call) -> Value | None:
    value = _with_constant(call, "multiply", 1 / 6)
    return value if value is not None else _with_constant(call, "divide", 6.0)


def _is_shifted_relu6(value: Value, x: Value) -> bool:
    """Whether a tensor is relu6(x + 3)."""
    relu = value.producer
    if relu is None:
        return False
    layer = relu.layer
    is_relu6 = _symbol(relu) == "relu6" or (
        type(layer) is keras.layers.ReLU and layer.max_value is not None and layer.max_value == 6
    )
    shift = relu.inputs[0].producer if is_relu6 else None
    return shift is not None and _with_constant(shift, "add", 3.0) is x


def _shifted_relu6(value: Value) -> list[Call]:
    relu = value.producer
    assert relu is not None
    shift = relu.inputs[0].producer
    assert shift is not None
    return [relu, shift]
