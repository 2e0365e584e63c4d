"""Shapes for a fixed batch size, which microcontrollers and NPUs require."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.kernel_families import XNNPACK
from keras_qat.integer_graph.execute import prepare, run
from keras_qat.integer_graph.float_nodes import compute_in_float
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.backend import make_tf_function
from keras_qat.ops.node import Constant, Node, Operand, Tensor
from keras_qat.ops.op import get_held_dtype


def with_batch(graph: ResolvedGraph, size: int, sized: bool = True) -> ResolvedGraph:
    """Returns the graph for batches of `size` examples, with the shapes that TensorFlow infers.

    Other sizes that the inputs leave open stay open. `sized` says whether operators also round as
    with a known size.

    Raises:
        ValueError: if the inputs fix a number of rows that the layers mix, as nodes of a graph.
    """
    shapes = _shapes(graph, size)
    _check_rows(graph, size, shapes)
    copies: dict[Tensor, Tensor] = {}

    def resized(tensor: Tensor) -> Tensor:
        if tensor not in copies:
            shape = shapes.get(tensor, tensor.shape)
            copies[tensor] = dataclasses.replace(tensor, shape=shape)
        return copies[tensor]

    def resized_operand(operand: Operand) -> Operand:
        return operand if isinstance(operand, Constant) else resized(operand)

    def resized_node(node: Node) -> Node:
        inputs = tuple(map(resized_operand, node.inputs))
        outputs = tuple(map(resized, node.outputs))
        return dataclasses.replace(node, inputs=inputs, outputs=outputs, sized=sized)

    return dataclasses.replace(
        graph,
        inputs={name: resized(tensor) for name, tensor in graph.inputs.items()},
        outputs={name: resized(tensor) for name, tensor in graph.outputs.items()},
        nodes=tuple(map(resized_node, graph.nodes)),
        tensors={value: resized(tensor) for value, tensor in graph.tensors.items()},
        values={resized(tensor): value for tensor, value in graph.values.items()},
    )


def _check_rows(graph: ResolvedGraph, size: int, shapes: Mapping[Tensor, Any]) -> None:
    """Raises a `ValueError` if an output does not follow the number of examples."""
    fixed = graph.origin.inputs.batch_size
    if fixed is None:
        return
    for name, tensor in graph.outputs.items():
        rows, rows_now = tensor.shape[0], shapes[tensor][0]
        if rows is not None and rows_now is not None and rows_now * fixed != rows * size:
            raise ValueError(
                f"'{graph.name}' computes its {fixed} rows together: for a batch of {size} output "
                f"'{name}' would still have {rows_now}. Make the rows an axis of each example, "
                f"keras.Input(({fixed}, ...)), or export for a target that takes {fixed} at a time."
            )


def _shapes(graph: ResolvedGraph, size: int) -> dict[Tensor, tuple[int | None, ...]]:
    """Infers the shapes of all tensors, by tracing a function that never runs.

    All kernels give the same shapes. Those of `XNNPACK` are traced in the fewest operations of all
    that compute in integers.
    """
    numbers = prepare(graph, XNNPACK)

    def spec(tensor: Tensor) -> Any:
        dtype = tensor.dtype if tensor.params is None else get_held_dtype(tensor.params)
        return tf.TensorSpec((size, *tensor.shape[1:]), dtype)

    shapes: dict[Tensor, tuple[int | None, ...]] = {}

    def trace(*inputs: Any) -> None:
        tensors = run(graph, list(inputs), XNNPACK, compute_in_float, numbers)
        shapes.update((tensor, tuple(x.shape)) for tensor, x in tensors.items())

    specs = map(spec, graph.inputs.values())
    make_tf_function(trace).get_concrete_function(*specs)
    return shapes
