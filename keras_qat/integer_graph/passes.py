"""Passes that change a resolved graph for a file: padding, int4, outputs and batch size."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily
from keras_qat.arithmetic.quant_params import single
from keras_qat.integer_graph.execute import prepare, run
from keras_qat.integer_graph.float_nodes import compute_in_float
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.keras2.backend import make_tf_function
from keras_qat.ops.conv import CONV, DEPTHWISE_CONV
from keras_qat.ops.emission import as_pair
from keras_qat.ops.node import Constant, Node, Operand, Tensor
from keras_qat.ops.op import get_held_dtype
from keras_qat.ops.requantize import QUANTIZE
from keras_qat.ops.reshaping import PAD
from keras_qat.ops.weights import Weights

Shape = tuple[int | None, ...]


def fuse_padding(graph: ResolvedGraph) -> ResolvedGraph:
    """Replaces explicit zero padding before a convolution by the convolution's SAME padding.

    Models of Keras Applications pad images before strided convolutions. Results do not change. The
    file needs no memory for the padded image, which is often the largest tensor.
    """
    reads = Counter(operand for node in graph.nodes for operand in node.inputs)
    reads.update(graph.outputs.values())
    pads = {node.output: node for node in graph.nodes if node.op is PAD and reads[node.output] == 1}
    nodes: list[Node] = []
    for node in graph.nodes:
        source = node.inputs[0] if node.op in (CONV, DEPTHWISE_CONV) else None
        pad = pads.get(source) if isinstance(source, Tensor) else None
        if pad is not None and _is_same_padding(pad, node):
            nodes.remove(pad)
            attributes = {**node.attributes, "padding": "same"}
            node = dataclasses.replace(node, attributes=attributes, inputs=pad.inputs)
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _is_same_padding(pad: Node, node: Node) -> bool:
    """Return whether `node` with SAME padding pads exactly like `pad`."""
    options, weights, (source,) = node.attributes, node.weights, pad.inputs
    assert isinstance(source, Tensor)
    sizes, shape = source.shape[1:-1], () if weights is None else weights.q.shape[:-2]
    if options["padding"] != "valid" or len(sizes) != 2 or len(shape) != 2:
        return False
    same_padding = [(0, 0)]
    strides, dilations = as_pair(options["strides"]), as_pair(options["dilation"])
    for size, window, stride, dilation in zip(sizes, shape, strides, dilations, strict=True):
        if size is None:
            return False
        reach = (window - 1) * dilation + 1
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        same_padding.append((total // 2, total - total // 2))
    return tuple(pad.attributes["paddings"]) == (*same_padding, (0, 0))


def quantize_outputs(graph: ResolvedGraph) -> ResolvedGraph:
    """Quantizes float outputs. Raises a `ValueError` if the range of an output is unknown."""
    nodes, outputs = list(graph.nodes), dict(graph.outputs)
    for name, tensor in graph.outputs.items():
        if tensor.params is not None or not tensor.is_float:
            continue
        if tensor not in graph.unrounded:
            raise ValueError(
                f"Output '{name}' is float, and its range is not known. Leave output_dtype out to "
                f"export float32, or quantize the layer that computes the output."
            )
        scope, call = f"{tensor.name}/quantized", graph.values[tensor].producer
        assert call is not None
        end = dataclasses.replace(tensor, name=scope, params=graph.unrounded[tensor])
        outputs[name] = end
        nodes.append(Node(scope, QUANTIZE, {}, call, (tensor,), (end,), layer=call.layer))
    return dataclasses.replace(graph, nodes=tuple(nodes), outputs=outputs)


def has_int4(graph: ResolvedGraph) -> bool:
    return any(node.weights is not None and node.weights.packed for node in graph.nodes)


def pack_if_requested(
    graph: ResolvedGraph, requested: bool | None, family: KernelFamily
) -> ResolvedGraph:
    """Packs weights into 4 bits if `requested`. The default is `model.pack_int4`."""
    packs = graph.origin.packs_int4 if requested is None else requested
    return pack_int4(graph, family) if packs else graph


def pack_int4(graph: ResolvedGraph, family: KernelFamily = XNNPACK) -> ResolvedGraph:
    """Packs all weights that fit in 4 bits and have a 4-bit kernel."""
    return dataclasses.replace(graph, nodes=tuple(pack_node(node, family) for node in graph.nodes))


def pack_node(node: Node, family: KernelFamily = XNNPACK) -> Node:
    """Packs a node's weights if they fit in 4 bits and have a 4-bit kernel.

    In TFLite Micro, a FULLY_CONNECTED with 4-bit weights requires one scale per tensor. If there is
    one scale per channel, the node becomes a CONV_2D.
    """
    op, weights = node.op, node.weights
    if op is None or weights is None or weights.divisor is None or not op.supports_int4:
        return node
    if node.output.params is None or node.output.params.bits == 16:
        return node
    attributes = node.attributes
    if "form" in attributes and weights.per_channel and not family.int4_dense_per_channel:
        attributes = {**attributes, "form": "convolution"}
    return dataclasses.replace(node, attributes=attributes, weights=_divide(weights))


def _divide(weights: Weights) -> Weights:
    """Divide weights by `weights.divisor`, so that they fit in 4 bits. Multiply the scales."""
    divisor, bias = weights.divisor, weights.bias
    if bias is not None:
        shape = tuple(bias.shape) if np.size(divisor) > 1 else []
        bias = tf.round(bias / np.reshape(divisor, shape))
    q, scale = weights.q / divisor, single(weights.scale * divisor)  # float32, as in files.
    if not tf.is_tensor(weights.q):
        q, scale = np.round(q), scale.numpy()
        bias = None if bias is None else bias.numpy()
    return dataclasses.replace(
        weights, q=q, scale=scale, bias=bias, reach=None, packed=True, divisor=None
    )


def set_batch_size(graph: ResolvedGraph, size: int, sized: bool = True) -> ResolvedGraph:
    """Returns a graph with the batch size `size`. Shapes that depend on it are inferred.

    Other unknown sizes stay unknown. `sized` is the value for `Node.sized`.
    """
    shapes = _infer_shapes(graph, size)
    copies: dict[Tensor, Tensor] = {}

    def resize(tensor: Tensor) -> Tensor:
        if tensor not in copies:
            shape = shapes.get(tensor, tensor.shape)
            copies[tensor] = dataclasses.replace(tensor, shape=shape)
        return copies[tensor]

    def resize_operand(operand: Operand) -> Operand:
        return operand if isinstance(operand, Constant) else resize(operand)

    def resize_node(node: Node) -> Node:
        inputs = tuple(map(resize_operand, node.inputs))
        outputs = tuple(map(resize, node.outputs))
        return dataclasses.replace(node, inputs=inputs, outputs=outputs, sized=sized)

    return dataclasses.replace(
        graph,
        inputs={name: resize(tensor) for name, tensor in graph.inputs.items()},
        outputs={name: resize(tensor) for name, tensor in graph.outputs.items()},
        nodes=tuple(map(resize_node, graph.nodes)),
        tensors={value: resize(tensor) for value, tensor in graph.tensors.items()},
        values={resize(tensor): value for tensor, value in graph.values.items()},
    )


def _infer_shapes(graph: ResolvedGraph, size: int) -> dict[Tensor, Shape]:
    """Infer the shapes of all tensors by tracing the graph without running it."""
    prepared = prepare(graph, XNNPACK)
    shapes: dict[Tensor, Shape] = {}

    def trace(*inputs: tf.Tensor) -> None:
        tensors = run(graph, list(inputs), XNNPACK, compute_in_float, prepared)
        shapes.update((tensor, tuple(x.shape)) for tensor, x in tensors.items())

    specs = [
        tf.TensorSpec(
            (size, *tensor.shape[1:]),
            tensor.dtype if tensor.params is None else get_held_dtype(tensor.params),
        )
        for tensor in graph.inputs.values()
    ]
    make_tf_function(trace).get_concrete_function(*specs)
    return shapes
