"""Finds out which weighted operator a custom layer is, from what its `call` computes."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.graph.precision import computing_in_float32
from keras_qat.keras2.backend import swapped
from keras_qat.keras2.layers_and_models import takes_training
from keras_qat.messages import counted
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

SIZE = 24
"""Size of open axes while tracing: larger than common weights."""

LARGEST = 3
"""Trial numbers are integers from minus this to this, so that sums are exact."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """The weighted operator that a layer computes.

    Args:
        op: the operator's row.
        attributes: the operator's options.
        bias: attribute of the layer that holds the bias, or None.
    """

    op: Op
    attributes: Attributes
    bias: str | None = None


def weighted_op_of(layer: Any, weight: str, input_shape: tuple[int | None, ...]) -> Traced | str:
    """Returns the weighted operator that a built layer computes.

    Its `call` is traced with the weights as an argument. It has to contain a single product, which
    tells the candidate. The layer is that operator if both compute the same from random numbers.

    Args:
        layer: the layer; its `call` reads the weights, and a bias, from attributes.
        weight: the attribute that holds the weights.
        input_shape: shape of its input, with the batch.

    Returns:
        The operator, or in a few words why there is none.
    """
    sizes = (2, *(SIZE if size is None else size for size in input_shape[1:]))
    kernel = getattr(layer, weight)
    other_weights = {
        name: value
        for name, value in vars(layer).items()
        if any(value is variable for variable in layer.weights) and value is not kernel
    }
    if len(layer.weights) > 2 or len(layer.weights) > len(other_weights) + 1:
        return "it has more weights than a kernel and a bias"
    bias = next(iter(other_weights), None)
    numbers = np.random.default_rng(0)

    def random(shape: Any) -> Any:
        drawn = numbers.integers(-LARGEST, LARGEST + 1, [int(size) for size in shape])
        return tf.constant(drawn.astype(np.float32))

    x, weights, offsets = random(sizes), random(kernel.shape), None
    replaced = {weight: weights}
    if bias is not None:
        offsets = replaced[bias] = random(other_weights[bias].shape)
    options = {"training": False} if takes_training(layer) else {}
    try:
        with computing_in_float32(layer):
            operations = _operations(layer, x, replaced, options)
            with swapped(layer, **replaced):
                expected = layer.call(x, **options)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        return f"its call cannot be traced ({str(error).splitlines()[0]})"
    products = [operation for operation in operations if operation.op in CANDIDATES]
    if len(products) != 1:
        number = counted(len(products), "product") if products else "no products"
        return f"it computes {number} with its weights"
    op, compute, options_of = CANDIDATES[products[0].op]
    for options_found in options_of(products[0], operations, len(x.shape)):
        attributes = {**op.defaults, **options_found}
        if _is_same(partial(compute, attributes), x, weights, offsets, expected):
            return Traced(op, attributes, bias)
    return "it does not compute a product with its weights and a bias alone"


def traced(weights: dict[str, tuple[int, ...]]) -> Registered:
    """Registers a layer class whose operator is found by tracing, once for each layer.

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
        result = weighted_op_of(call.layer, name, call.inputs[0].shape)
    if isinstance(result, str):
        return Match(None, {}, result)
    if result.bias not in (None, "bias"):
        return Match(None, {}, f"its bias is in {result.bias}: it has to be in the attribute bias")
    (axes_of_op,) = result.op.weights.values()
    if axes not in ((), axes_of_op):
        return Match(None, {}, f"the output channels of a {result.op.name} are axes {axes_of_op}")
    row = dataclasses.replace(result.op, weights={name: axes}, folds_batch_norm=False)
    return Match(row, result.attributes)


def _operations(layer: Any, x: Any, replaced: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    graph = tf.__internal__.FuncGraph("traced")
    with graph.as_default():
        inputs, *weights = (
            tf.raw_ops.Placeholder(dtype=tf.float32, shape=tensor.shape)
            for tensor in (x, *replaced.values())
        )
        with swapped(layer, **dict(zip(replaced, weights, strict=True))):
            layer.call(inputs, **options)
    graph_def = graph.as_graph_def()
    # Keras computes groups in functions.
    inner = [node for function in graph_def.library.function for node in function.node_def]
    return [*graph_def.node, *inner]


def _is_same(compute: Any, x: Any, weights: Any, offsets: Any, expected: Any) -> bool:
    try:
        computed = compute(x, weights)
        computed = computed if offsets is None else computed + offsets
    except (ValueError, tf.errors.InvalidArgumentError):  # Shapes that do not fit.
        return False
    return computed.shape == expected.shape and bool(tf.reduce_all(computed == expected))


def _on_axes(sizes: Any, rank: int) -> tuple[int, ...]:
    """Returns strides or dilations of an image operation along the axes of the layer's input."""
    numbers = tuple(map(int, sizes))
    numbers = numbers[1:3] if len(numbers) == 4 else numbers
    return numbers[-1:] if rank == 3 else numbers


def _options_of_conv(convolution: Any, operations: list[Any], rank: int) -> Iterator[Attributes]:
    """Yields possible options. Around a dilated operation the padding may be any."""
    strides = _on_axes(convolution.attr["strides"].list.i, rank)
    dilation = _on_axes(convolution.attr["dilations"].list.i, rank)
    around = [operation.input[1] for operation in operations if operation.op == "SpaceToBatchND"]
    for operation in operations:
        if around and operation.op == "Const" and around[0].split(":")[0] == operation.name:
            block = tf.make_ndarray(operation.attr["value"].tensor)
            dilation = (1, *(int(size) for size in block))[-(rank - 2) :]
    is_causal = rank == 3 and convolution.op == "Conv2D"
    for padding in ("same", "valid", *(["causal"] if is_causal else [])):
        yield {"strides": strides, "padding": padding, "dilation": dilation}


def _options_of_transposed(
    convolution: Any, operations: list[Any], rank: int
) -> Iterator[Attributes]:
    strides = _on_axes(convolution.attr["strides"].list.i, rank)
    padding = convolution.attr["padding"].s.decode().lower()
    for added in (None, *itertools.product(*(range(stride) for stride in strides))):
        yield {"strides": strides, "padding": padding, "output_padding": added}


Candidate = tuple[
    Op, Callable[[Attributes, Any, Any], Any], Callable[[Any, list[Any], int], Iterator[Attributes]]
]

_DENSE: Candidate = (DENSE, lambda a, x, kernel: product(x, kernel), lambda *_: iter([{}]))

CANDIDATES: dict[str, Candidate] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _DENSE),
    "Conv2D": (CONV, convolved, _options_of_conv),
    "DepthwiseConv2dNative": (DEPTHWISE_CONV, convolved_by_channel, _options_of_conv),
    "Conv2DBackpropInput": (TRANSPOSE_CONV, transposed, _options_of_transposed),
}
"""TensorFlow operation -> the candidate operator, a function that computes it from attributes, an
input and weights, and a function that yields its possible attributes."""
