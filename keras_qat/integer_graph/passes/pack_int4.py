"""Packs weights of 4 bits two in a byte, which TFLite kernels sum differently from 8-bit ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily
from keras_qat.arithmetic.quant_params import single
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.node import Node
from keras_qat.ops.weights import Weights


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
