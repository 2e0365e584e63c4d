"""Resolved graphs for batches of a size that is known, as microcontrollers and NPUs ask."""

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
    """The same graph for batches of `size` examples, all shapes being what TensorFlow infers.

    Sizes that the input leaves open besides stay open, as does what follows from them. `sized`:
    whether operators round as with a known size, too.
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
    """The shapes of all tensors that are computed, in a graph that never runs."""

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
