"""Passes that change a resolved graph for a file: padding, int4, outputs and batch size."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

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


def packs_int4(graph: ResolvedGraph) -> bool:
    """Whether any weights of a graph are packed in 4 bits."""
    return any(node.weights is not None and node.weights.packed for node in graph.nodes)


def as_asked(graph: ResolvedGraph, pack_int4: bool | None, family: KernelFamily) -> ResolvedGraph:
    """Packs weights into 4 bits if asked to; for None, if the model is set to `pack_int4`."""
    packs = graph.origin.packs_int4 if pack_int4 is None else pack_int4
    return with_int4(graph, family) if packs else graph


def with_int4(graph: ResolvedGraph, family: KernelFamily = XNNPACK) -> ResolvedGraph:
    """Packs weights into 4 bits where they fit and the runtime has kernels for them."""
    nodes = tuple(packed(node, family) for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def packed(node: Node, family: KernelFamily = XNNPACK) -> Node:
    """Packs a node's weights into 4 bits if they fit and the runtime has a kernel for them.

    TFLite Micro's FULLY_CONNECTED takes one scale for them, and its CONV_2D one for each channel.
    """
    op, weights = node.op, node.weights
    if op is None or weights is None or weights.divisor is None or not op.supports_int4:
        return node
    if node.output.params is None or node.output.params.bits == 16:
        return node
    attributes = node.attributes
    if "form" in attributes and weights.per_channel and not family.int4_dense_per_channel:
        attributes = {**attributes, "form": "convolution"}
    return dataclasses.replace(node, attributes=attributes, weights=_divided(weights))


def _divided(weights: Weights) -> Weights:
    """Divides weights by their divisor, of tensors as well as of arrays."""
    divisor, bias = weights.divisor, weights.bias
    if bias is not None:
        of_bias = np.reshape(divisor, tuple(bias.shape) if np.size(divisor) > 1 else [])
        bias = tf.round(bias / of_bias)
    q, scale = weights.q / divisor, single(weights.scale * divisor)  # As files hold scales.
    if not tf.is_tensor(weights.q):
        q, scale = np.round(q), scale.numpy()
        bias = None if bias is None else bias.numpy()
    return dataclasses.replace(
        weights, q=q, scale=scale, bias=bias, reach=None, packed=True, divisor=None
    )


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
