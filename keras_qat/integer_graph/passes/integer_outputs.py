"""Outputs in float that a file returns as integers."""

from __future__ import annotations

import dataclasses

from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.requantize import QUANTIZE


def with_integer_outputs(graph: ResolvedGraph) -> ResolvedGraph:
    """Quantizes the outputs that layers in float compute, to the ranges that were observed.

    Raises:
        ValueError: if the range of such an output is not known.
    """
    nodes, outputs = list(graph.nodes), dict(graph.outputs)
    for name, tensor in graph.outputs.items():
        if tensor.params is not None or not tensor.is_float:
            continue
        if tensor not in graph.unrounded:
            raise ValueError(
                f"Output '{name}' computes in float, and its range is not known. Leave "
                f"output_dtype out, with which it is float32, or quantize its layer."
            )
        outputs[name], node = _quantized(graph, tensor)
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes), outputs=outputs)


def _quantized(graph: ResolvedGraph, tensor: Tensor) -> tuple[Tensor, Node]:
    """Returns a tensor in the range of an output in float, and the node that computes it."""
    name, call = f"{tensor.name}/quantized", graph.values[tensor].producer
    assert call is not None
    quantized = dataclasses.replace(tensor, name=name, params=graph.unrounded[tensor])
    return quantized, Node(name, QUANTIZE, {}, call, (tensor,), (quantized,), layer=call.layer)
