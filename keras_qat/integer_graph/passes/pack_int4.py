"""Weights packed in 4 bits, two in a byte, which TFLite kernels sum otherwise than 8-bit ones."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.node import Node
from keras_qat.ops.weights import Weights

HIGHEST = 7
"""Largest quantized value of a 4-bit weight; -8 is not used."""


def packs_int4(graph: ResolvedGraph) -> bool:
    """Whether any weights of a graph are packed in 4 bits."""
    return any(node.weights is not None and node.weights.packed for node in graph.nodes)


def with_int4(graph: ResolvedGraph, family: KernelFamily = XNNPACK) -> ResolvedGraph:
    """Packs weights into 4 bits where they fit and the runtime has kernels for them."""
    nodes = tuple(packed(node, family) for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def packed(node: Node, family: KernelFamily = XNNPACK) -> Node:
    """Packs a node's weights into 4 bits if they fit and the runtime has a kernel for them.

    TFLite Micro's FULLY_CONNECTED takes one scale for them, and its CONV_2D one for each channel.
    """
    op, weights = node.op, node.weights
    if op is None or weights is None or not op.takes_int4:
        return node
    if node.output.params is None or node.output.params.bits == 16:
        return node
    divided = _divided(weights, op.weights[weights.name])
    if divided is None:
        return node
    attributes = node.attributes
    if "form" in attributes and divided.per_channel and not family.int4_dense_per_channel:
        attributes = {**attributes, "form": "convolution"}
    return dataclasses.replace(node, attributes=attributes, weights=divided)


def _divided(weights: Weights, channels: tuple[int, ...]) -> Weights | None:
    """Divides weights by the common divisor of their channel; None if they still exceed 4 bits.

    Weights trained with few bits have such a divisor, because their scales were made finer by it.
    """
    q = np.asarray(weights.q).astype(np.int32)
    own = [axis % q.ndim for axis in channels] if weights.per_channel else []
    others = tuple(axis for axis in range(q.ndim) if axis not in own)
    divisors = np.maximum(np.gcd.reduce(q, axis=others, keepdims=True), 1)
    small = q // divisors
    if np.max(np.abs(small), initial=0) > HIGHEST:
        return None
    # As files hold scales.
    scale = np.float32(weights.scale) * np.float32(divisors)
    bias = weights.bias
    if bias is not None:
        of_bias = divisors.reshape(np.shape(bias) if divisors.size > 1 else -1)
        bias = np.round(np.asarray(bias) / of_bias)
    return dataclasses.replace(
        weights,
        q=small.astype(np.float64),
        scale=scale.astype(np.float64),
        bias=bias,
        reach=None,
        packed=True,
    )
