"""Explicit zero padding replaced by the padding of the convolution behind it."""

from __future__ import annotations

import dataclasses
from collections import Counter

from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.conv import CONV, DEPTHWISE_CONV
from keras_qat.ops.image_shapes import as_pair
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.padding import PAD


def with_own_padding(graph: ResolvedGraph) -> ResolvedGraph:
    """Replaces explicit zero padding before a convolution by the convolution's own SAME padding.

    Keras applications pad so before strided convolutions. The sums stay the same, and the padded
    image, the largest tensor of a small network, needs no memory.
    """
    reads = Counter(operand for node in graph.nodes for operand in node.inputs)
    reads.update(graph.outputs.values())
    pads = {node.output: node for node in graph.nodes if node.op is PAD and reads[node.output] == 1}
    nodes: list[Node] = []
    for node in graph.nodes:
        source = node.inputs[0] if node.op in (CONV, DEPTHWISE_CONV) else None
        pad = pads.get(source) if isinstance(source, Tensor) else None
        if pad is not None and _is_own(pad, node):
            nodes.remove(pad)
            attributes = {**node.attributes, "padding": "same"}
            node = dataclasses.replace(node, attributes=attributes, inputs=pad.inputs)
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _is_own(pad: Node, node: Node) -> bool:
    """Whether a convolution with SAME padding pads its input exactly as `pad` does."""
    options, weights, (source,) = node.attributes, node.weights, pad.inputs
    assert isinstance(source, Tensor)
    sizes, shape = source.shape[1:-1], () if weights is None else weights.q.shape[:-2]
    if options["padding"] != "valid" or len(sizes) != 2 or len(shape) != 2:
        return False
    same_padding = [(0, 0)]
    strides, dilations = as_pair(options["strides"]), as_pair(options["dilation"])
    for size, steps, stride, dilation in zip(sizes, shape, strides, dilations, strict=True):
        if size is None:
            return False
        reach = (steps - 1) * dilation + 1
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        same_padding.append((total // 2, total - total // 2))
    return tuple(pad.attributes["paddings"]) == (*same_padding, (0, 0))
