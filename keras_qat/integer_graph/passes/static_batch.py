"""Shapes for a fixed batch size, which microcontrollers and NPUs require."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.kernel_families import REFERENCE
from keras_qat.frontend.keras2.backend import traced
from keras_qat.integer_graph.execute import held_in, run
from keras_qat.integer_graph.float_nodes import compute_in_float
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.node import Constant, Node, Operand, Tensor


def with_batch(graph: ResolvedGraph, size: int, sized: bool = True) -> ResolvedGraph:
    """Returns the graph for batches of `size` examples, with the shapes that TensorFlow infers.

    Other sizes that the inputs leave open stay open. `sized` says whether operators also round as
    with a known size.
    """
    shapes = _shapes(graph, size)
    made: dict[Tensor, Tensor] = {}

    def resized(tensor: Tensor) -> Tensor:
        if tensor not in made:
            shape = shapes.get(tensor, tensor.shape)
            made[tensor] = dataclasses.replace(tensor, shape=shape)
        return made[tensor]

    def operand(each: Operand) -> Operand:
        return each if isinstance(each, Constant) else resized(each)

    def node(each: Node) -> Node:
        inputs, outputs = tuple(map(operand, each.inputs)), tuple(map(resized, each.outputs))
        return dataclasses.replace(each, inputs=inputs, outputs=outputs, sized=sized)

    return dataclasses.replace(
        graph,
        inputs={name: resized(each) for name, each in graph.inputs.items()},
        outputs={name: resized(each) for name, each in graph.outputs.items()},
        nodes=tuple(map(node, graph.nodes)),
        tensors={value: resized(each) for value, each in graph.tensors.items()},
        values={resized(each): value for each, value in graph.values.items()},
    )


def _shapes(graph: ResolvedGraph, size: int) -> dict[Tensor, tuple[int | None, ...]]:
    """Infers the shapes of all tensors, by tracing a function that never runs."""

    def given(tensor: Tensor) -> Any:
        dtype = tensor.dtype if tensor.params is None else held_in(tensor.params)
        return tf.TensorSpec((size, *tensor.shape[1:]), dtype)

    found: dict[Tensor, tuple[int | None, ...]] = {}

    def trace(*inputs: Any) -> None:
        tensors = run(graph, list(inputs), REFERENCE, compute_in_float)
        found.update((tensor, tuple(each.shape)) for tensor, each in tensors.items())

    specs = [given(each) for each in graph.inputs.values()]
    traced(trace).get_concrete_function(*specs)
    return found
