"""Padding with zeros in front of a convolution that the convolution's own kernel can do."""

from __future__ import annotations

import dataclasses
from collections import Counter

from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.conv import CONV, DEPTHWISE_CONV
from keras_qat.ops.image_shapes import pair
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.padding import PAD


def with_own_padding(graph: ResolvedGraph) -> ResolvedGraph:
    """The same graph, with "same" padding in place of zeros that are put around its input before.

    Keras pads so in front of convolutions with strides. The sums are the same, and the padded
    images, which are the largest tensor of a small network, need no memory.
    """
    reads = Counter(each for node in graph.nodes for each in node.inputs)
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
    """Whether a convolution pads its input just so, if it is told to pad."""
    options, weights, (source,) = node.attributes, node.weights, pad.inputs
    assert isinstance(source, Tensor)
    sizes, shape = source.shape[1:-1], () if weights is None else weights.q.shape[:-2]
    if options["padding"] != "valid" or len(sizes) != 2 or len(shape) != 2:
        return False
    wanted = [(0, 0)]
    strides, dilations = pair(options["strides"]), pair(options["dilation"])
    for size, steps, stride, dilation in zip(sizes, shape, strides, dilations, strict=True):
        if size is None:
            return False
        reach = (steps - 1) * dilation + 1
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        wanted.append((total // 2, total - total // 2))
    return tuple(pad.attributes["paddings"]) == (*wanted, (0, 0))
