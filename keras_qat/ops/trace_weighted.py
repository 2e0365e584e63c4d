"""Which weighted operator a custom layer is, found by looking at what its `call` computes."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call, takes_training
from keras_qat.frontend.keras2.backend import swapped
from keras_qat.frontend.keras2.precision import computing_in_float32
from keras_qat.ops.conv import (
    CONV,
    DEPTHWISE_CONV,
    TRANSPOSE_CONV,
    convolved,
    convolved_by_channel,
    transposed,
)
from keras_qat.ops.dense import DENSE, product
from keras_qat.ops.op import Attributes, Op
from keras_qat.ops.registry import Match, Registered

__all__ = ["Traced", "traced", "weighted_op_of"]

SIZE = 24
"""What open sizes are while tracing: more than kernels usually reach."""

LARGEST = 3
"""Numbers that are tried are whole, from minus this to this, so that sums are exact."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """The weighted operator that a layer is.

    Args:
        op: the row.
        attributes: its options.
        bias: attribute of the layer that holds the bias, or None.
    """

    op: Op
    attributes: Attributes
    bias: str | None = None


def weighted_op_of(layer: Any, weight: str, input_shape: tuple[int | None, ...]) -> Traced | str:
    """The weighted operator that a built layer is.

    Its `call` is traced with the weights as an argument. There has to be a single product, which
    says what the layer may be. It is that if it computes the same from random numbers.

    Args:
        layer: the layer; its `call` reads the weights, and a bias, from attributes.
        weight: attribute that holds the weights.
        input_shape: of its input, with the batch.

    Returns:
        The operator, or why it is none: a few words.
    """
    sizes = (2, *(SIZE if size is None else size for size in input_shape[1:]))
    kernel = getattr(layer, weight)
    others = {
        name: each
        for name, each in vars(layer).items()
        if any(each is variable for variable in layer.weights) and each is not kernel
    }
    if len(layer.weights) > 2 or len(layer.weights) > len(others) + 1:
        return "it has more weights than a kernel and a bias"
    bias = next(iter(others), None)
    numbers = np.random.default_rng(0)

    def random(shape: Any) -> Any:
        drawn = numbers.integers(-LARGEST, LARGEST + 1, [int(size) for size in shape])
        return tf.constant(drawn.astype(np.float32))

    x, weights, offsets = random(sizes), random(kernel.shape), None
    replaced = {weight: weights}
    if bias is not None:
        offsets = replaced[bias] = random(others[bias].shape)
    options = {"training": False} if takes_training(layer) else {}
    try:
        with computing_in_float32(layer):
            operations = _operations(layer, x, replaced, options)
            with swapped(layer, **replaced):
                expected = layer.call(x, **options)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        return f"its call cannot be traced ({str(error).splitlines()[0]})"
    products = [each for each in operations if each.op in CANDIDATES]
    if len(products) != 1:
        return f"it computes {len(products) or 'no'} products with its weights"
    op, compute, options_of = CANDIDATES[products[0].op]
    for found in options_of(products[0], operations, len(x.shape)):
        attributes = {**op.defaults, **found}
        if _is_same(partial(compute, attributes), x, weights, offsets, expected):
            return Traced(op, attributes, bias)
    return "it does not compute a product with its weights and a bias alone"


def traced(weights: dict[str, tuple[int, ...]]) -> Registered:
    """What a layer class with such weights is: found out layer by layer, once for each.

    Args:
        weights: attribute that holds a weight -> axes of its output channels, counted from the
            end; `()` for one scale for all. With several the layer computes in float.
    """
    known: weakref.WeakKeyDictionary[Any, Match] = weakref.WeakKeyDictionary()

    def match(call: Call) -> Match:
        if len(weights) != 1:
            return Match(None, {}, "several weights; they are held in 8 bits")
        if call.layer not in known:
            ((name, axes),) = weights.items()
            known[call.layer] = _matched(call, name, axes)
        return known[call.layer]

    return Registered(match, tuple(weights))


def _matched(call: Call, name: str, axes: tuple[int, ...]) -> Match:
    with tf.init_scope():  # The numbers, also while a function is being traced.
        found = weighted_op_of(call.layer, name, call.inputs[0].shape)
    if isinstance(found, str):
        return Match(None, {}, found)
    if found.bias not in (None, "bias"):
        return Match(None, {}, f"its bias is in {found.bias}: it has to be in the attribute bias")
    (own,) = found.op.weights.values()
    if axes not in ((), own):
        return Match(None, {}, f"the output channels of a {found.op.name} are axes {own}")
    row = dataclasses.replace(found.op, weights={name: axes}, folds_batch_norm=False)
    return Match(row, found.attributes)


def _operations(layer: Any, x: Any, replaced: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    graph = tf.__internal__.FuncGraph("traced")
    with graph.as_default():
        inputs, *weights = (
            tf.raw_ops.Placeholder(dtype=tf.float32, shape=each.shape)
            for each in (x, *replaced.values())
        )
        with swapped(layer, **dict(zip(replaced, weights, strict=True))):
            layer.call(inputs, **options)
    found = graph.as_graph_def()  # With the functions that it calls, as Keras' of groups.
    return [*found.node, *(node for each in found.library.function for node in each.node_def)]


def _is_same(compute: Any, x: Any, weights: Any, offsets: Any, expected: Any) -> bool:
    try:
        found = compute(x, weights)
        found = found if offsets is None else found + offsets
    except (ValueError, tf.errors.InvalidArgumentError):  # Shapes that do not fit.
        return False
    return found.shape == expected.shape and bool(tf.reduce_all(found == expected))


def _options_of_dense(made: Any, operations: list[Any], rank: int) -> Iterator[Attributes]:
    yield {}


def _on_axes(sizes: Any, rank: int) -> tuple[int, ...]:
    """Strides or dilations of an operation on images for as many axes as the layer's input has."""
    found = tuple(int(each) for each in sizes)
    found = found[1:3] if len(found) == 4 else found
    return found[-1:] if rank == 3 else found


def _options_of_conv(made: Any, operations: list[Any], rank: int) -> Iterator[Attributes]:
    """A dilation may be around the operation, which then pads nothing, in whatever way."""
    strides = _on_axes(made.attr["strides"].list.i, rank)
    dilation = _on_axes(made.attr["dilations"].list.i, rank)
    around = [each.input[1] for each in operations if each.op == "SpaceToBatchND"]
    for each in operations:
        if around and each.op == "Const" and around[0].split(":")[0] == each.name:
            block = tf.make_ndarray(each.attr["value"].tensor)
            dilation = (1, *(int(size) for size in block))[-(rank - 2) :]
    is_causal = rank == 3 and made.op == "Conv2D"
    for padding in ("same", "valid", *(["causal"] if is_causal else [])):
        yield {"strides": strides, "padding": padding, "dilation": dilation}


def _options_of_transposed(made: Any, operations: list[Any], rank: int) -> Iterator[Attributes]:
    strides = _on_axes(made.attr["strides"].list.i, rank)
    padding = made.attr["padding"].s.decode().lower()
    for added in (None, *itertools.product(*(range(stride) for stride in strides))):
        yield {"strides": strides, "padding": padding, "output_padding": added}


Candidate = tuple[
    Op, Callable[[Attributes, Any, Any], Any], Callable[[Any, list[Any], int], Iterator[Attributes]]
]

_DENSE: Candidate = (DENSE, lambda a, x, kernel: product(x, kernel), _options_of_dense)

CANDIDATES: dict[str, Candidate] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _DENSE),
    "Conv2D": (CONV, convolved, _options_of_conv),
    "DepthwiseConv2dNative": (DEPTHWISE_CONV, convolved_by_channel, _options_of_conv),
    "Conv2DBackpropInput": (TRANSPOSE_CONV, transposed, _options_of_transposed),
}
"""Operation -> the operator that a layer may be, what that computes from attributes, an input and
weights, and what its attributes may be."""
