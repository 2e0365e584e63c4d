"""Products with a matrix of weights, for Dense and EinsumDense.

They are written in one of two forms. `fully_connected` is FULLY_CONNECTED, which every delegate
knows. With a scale for each channel it came late: runtimes before TensorFlow 2.17 compute its int8
reference kernel, and those before LiteRT 1.2 its int16 kernels, with multipliers that nobody set,
and do not say so. `convolution` is a CONV_2D of images of one pixel, which all of them compute
alike. So that is what int16 gets, and whoever works with an old TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, multiply_sizes
from keras_qat.helper_layers.computed_kernels import ComputedDense
from keras_qat.keras2.backend import layers
from keras_qat.ops.einsum import Axes, emit_product, expand_ellipsis, find_positions, parse_equation
from keras_qat.ops.emission import Emission
from keras_qat.ops.image_shapes import ONE_PIXEL, emit_on_images
from keras_qat.ops.movement import transpose
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.weighted_sums import (
    RECENT,
    Rounding,
    Sums,
    compute_weighted,
    prepare_sums,
    weight_constants,
)
from keras_qat.ops.weights import Weights, count_terms

FORM = "fully_connected" if RECENT else "convolution"
"""The form of layers; their attribute `form` can say otherwise."""


def _is_fully_connected(attributes: Attributes, wide: bool) -> bool:
    return attributes["form"] == "fully_connected" and not wide


def product(x: Any, kernel: Any) -> Any:
    """Multiplies by a matrix along the last axis.

    `tf.tensordot` takes several times as many operations where a size is open.
    """
    if x.shape.rank == 2:
        return tf.matmul(x, kernel)
    depth, columns = kernel.shape
    y = tf.matmul(tf.reshape(x, [-1, depth]), kernel)
    return tf.reshape(y, [*_sizes(x)[:-1], columns])


def _prepare(a: Arguments, channels: tuple[int, ...]) -> Sums:
    is_connected = _is_fully_connected(a.attributes, a.wide)
    is_double = is_connected and a.family.dense == "double"
    # XNNPACK's weights of 4 bits are pairs.
    is_paired = is_connected and count_terms(tuple(a.weights.q.shape), channels) % 2 == 0
    rounding: Rounding = "double" if is_double else "fixed"
    return prepare_sums(a, channels, rounding, None if is_paired else "up")


def _emit_product(e: Emission, x: int, end: int, arrange: Any) -> None:
    """Writes a product along the last axis; `arrange` turns weights into [output, input]."""
    if _is_fully_connected(e.attributes, e.wide):
        e.add(
            "FULLY_CONNECTED",
            [x, *weight_constants(e, arrange, 0)],
            [end],
            fusedActivationFunction=e.activation,
            keepNumDims=len(e.shape(x)) > 2,
        )
    else:
        weights = weight_constants(e, lambda q: arrange(q)[:, None, None], 0)
        emit_on_images(e, "CONV_2D", [x, *weights], end, **ONE_PIXEL)


def _sizes(x: Any) -> list[Any]:
    """Returns the sizes of a tensor, for a reshape: -1 if one is not known, tensors if several."""
    known = x.shape.as_list()
    are_open = known.count(None) > 1
    now = tf.unstack(tf.shape(x)) if are_open else [-1] * len(known)
    return [now[axis] if size is None else size for axis, size in enumerate(known)]


DENSE = Op(
    "dense",
    lambda a: compute_weighted(a, product),
    lambda e: _emit_product(e, e.inputs[0], e.outputs[0], lambda q: q.T),
    prepare=lambda a: _prepare(a, (-1,)),
    doc="products with a matrix along the last axis",
    layers=(layers.Dense, ComputedDense),
    attributes=lambda call: {"form": FORM},
    defaults={"form": FORM},
    integers=(),
    weights={"kernel": (-1,)},
    supports_int4=True,
    folds_batch_norm=True,
    can_merge_relu=True,
    products=lambda call: multiply_sizes((call.output.elements, call.inputs[0].shape[-1])),
)


# EinsumDense. Rows of the matrices are axes that stay, columns those of the result.


def _einsum_attributes(call: Call) -> Attributes:
    """Returns the `equation` without an ellipsis, and `bias_axes`, letters or ""."""
    layer = call.layer
    equation = layer.equation.replace(" ", "")
    inputs, weights, _ = terms = re.split(",|->", equation)
    if "..." in inputs and "." not in weights:
        first, *other_terms = expand_ellipsis(terms, len(call.inputs[0].shape) + 3 - len(inputs))
        equation = f"{first},{'->'.join(other_terms)}"
    return {"equation": equation, "bias_axes": layer.bias_axes or "", "form": FORM}


def _einsum_accepts(call: Call, attributes: Attributes) -> str | None:
    axes = parse_equation(attributes["equation"])
    if not (axes.are_matrices and axes.summed and axes.columns) or axes.batch:
        return f"{attributes['equation']} is no product with a matrix"
    sizes = dict(zip(axes.output, call.output.shape, strict=True))
    if any(axis in axes.rows and sizes[axis] != 1 for axis in attributes["bias_axes"]):
        return "its bias differs along other axes than the weights'"
    return None


def _einsum_per_channel(count: int) -> Any:
    """Returns an `accepts` for weights whose last `count` axes are the result's, in order.

    Other equations are left to the row with one scale for all weights.
    """

    def accepts(call: Call, attributes: Attributes) -> str | None:
        reason = _einsum_accepts(call, attributes)
        if reason is not None:
            return reason
        axes, bias_axes = parse_equation(attributes["equation"]), attributes["bias_axes"]
        is_last = len(axes.result) == count and axes.second.endswith(axes.result)
        is_whole = axes.output.endswith(axes.result) and set(bias_axes) == set(axes.result)
        return None if is_last and (is_whole or not bias_axes) else ""

    return accepts


def _prepare_einsum(a: Arguments) -> Sums:
    """Prepares the product with the weights as a matrix."""
    axes = parse_equation(a.attributes["equation"])
    weights = _with_whole_bias(a.weights, axes, a.attributes)
    columns = math.prod(_result_sizes(axes, weights.q))
    make: Any = np if isinstance(weights.q, np.ndarray) else tf
    q = make.transpose(weights.q, find_positions(axes.summed + axes.result, axes.second))
    weights = dataclasses.replace(weights, q=make.reshape(q, (-1, columns)))
    return _prepare(dataclasses.replace(a, weights=weights), (-1,))


def _einsum(a: Arguments) -> Any:
    axes = parse_equation(a.attributes["equation"])
    x = transpose(a.q[0], find_positions(axes.rows + axes.summed, axes.first))
    flat = tf.reshape(x, [-1, a.prepared.kernel.shape[0]])
    y = compute_weighted(dataclasses.replace(a, q=[flat]), tf.matmul)
    sizes = dict(zip(axes.output, a.call.output.shape, strict=True))
    stay = _sizes(x)[: len(axes.rows)]
    y = tf.reshape(y, [*stay, *(sizes[axis] for axis in axes.result)])
    return transpose(y, find_positions(axes.output, axes.rows + axes.result))


def _result_sizes(axes: Axes, kernel: Any) -> tuple[int, ...]:
    return tuple(kernel.shape[index] for index in find_positions(axes.result, axes.second))


def _with_whole_bias(weights: Weights, axes: Axes, attributes: Attributes) -> Weights:
    """Returns the weights with their bias repeated for each entry of the result's axes."""
    if weights.bias is None:
        return weights
    make, sizes = np if isinstance(weights.bias, np.ndarray) else tf, _result_sizes(axes, weights.q)
    of_axes = zip(axes.result, sizes, strict=True)
    shape = [size if axis in attributes["bias_axes"] else 1 for axis, size in of_axes]
    bias: Any = make.broadcast_to(make.reshape(weights.bias, shape), sizes)
    return dataclasses.replace(weights, bias=make.reshape(bias, [-1]))


def _emit_einsum(e: Emission) -> None:
    axes = parse_equation(e.attributes["equation"])
    order, sizes = (
        find_positions(axes.summed + axes.result, axes.second),
        _result_sizes(axes, e.weights.q),
    )
    depth = e.weights.q.size // math.prod(sizes)
    x = e.transpose(e.inputs[0], find_positions(axes.rows + axes.summed, axes.first))
    stay = e.shape(x)[: len(axes.rows)]
    x = e.reshaped(x, (*stay, depth), "flat")
    weights = _with_whole_bias(e.weights, axes, e.attributes)
    inner = dataclasses.replace(e, node=dataclasses.replace(e.node, weights=weights))

    def add(target: int) -> None:
        _emit_product(inner, x, target, lambda q: q.transpose(order).reshape(depth, -1).T)

    final = find_positions(axes.output, axes.rows + axes.result)
    emit_product(e, add, (*stay, math.prod(sizes)), (*stay, *sizes), final)


def _count_einsum(call: Call) -> int | None:
    """Counts multiply-accumulates: each value of the output sums products along some axes."""
    axes = parse_equation(_einsum_attributes(call)["equation"])
    sizes = dict(zip(axes.first, call.inputs[0].shape, strict=True))
    return multiply_sizes((call.output.elements, *(sizes[axis] for axis in axes.summed)))


EINSUM_DENSE = dataclasses.replace(
    DENSE,
    name="einsum_dense",
    prepare=_prepare_einsum,
    compute=_einsum,
    emit=_emit_einsum,
    doc="products with a matrix, along any axes",
    layers=(layers.EinsumDense,),
    attributes=_einsum_attributes,
    defaults={},
    accepts=_einsum_per_channel(1),
    folds_batch_norm=False,
    products=_count_einsum,
)

EINSUM_DENSE_HEADS = dataclasses.replace(
    EINSUM_DENSE,
    name="einsum_dense_heads",
    doc="products with a matrix whose columns make two axes: the projections of attention",
    accepts=_einsum_per_channel(2),
    weights={"kernel": (-2, -1)},
)

EINSUM_DENSE_PER_TENSOR = dataclasses.replace(
    EINSUM_DENSE,
    name="einsum_dense_per_tensor",
    doc="products with a matrix of other forms, with one scale for all weights",
    accepts=_einsum_accepts,
    weights={"kernel": ()},
)
