"""Products with a matrix of weights, for Dense and EinsumDense.

A file contains one of two variants:

- `fully_connected` is a FULLY_CONNECTED, which every delegate supports. Some older kernels compute
  random results if there is one scale per channel. These are the int8 reference kernel before
  TensorFlow 2.17 and the int16 kernels before LiteRT 1.2.
- `convolution` is a CONV_2D of one-pixel images, which all runtimes compute in the same way. It is
  used for int16, and for int8 with an old TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, multiply_sizes
from keras_qat.helper_layers.keras_variants import COMPUTED
from keras_qat.keras2.backend import layers
from keras_qat.ops import weighted_sums
from keras_qat.ops.emission import ONE_PIXEL, Emission, emit_on_images
from keras_qat.ops.matmul import Axes, emit_product, expand_ellipsis, find_positions, parse_equation
from keras_qat.ops.movement import transpose
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.weighted_sums import RECENT, Sums, compute_weighted
from keras_qat.ops.weights import Weights, count_terms

FORM = "fully_connected" if RECENT else "convolution"
"""The variant that new operators get as their attribute `form`."""


def _is_fully_connected(attributes: Attributes, wide: bool) -> bool:
    return attributes["form"] == "fully_connected" and not wide


def multiply(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    if x.shape.rank == 2:
        return tf.matmul(x, kernel)
    depth, columns = kernel.shape
    y = tf.matmul(tf.reshape(x, [-1, depth]), kernel)
    return tf.reshape(y, [*_find_sizes(x)[:-1], columns])


def _prepare(a: Arguments, channels: tuple[int, ...]) -> Sums:
    is_connected = _is_fully_connected(a.attributes, a.wide)
    is_double = is_connected and a.family.dense == "double"
    # XNNPACK only supports an even number of 4-bit weights per output.
    is_paired = is_connected and count_terms(tuple(a.weights.q.shape), channels) % 2 == 0
    rounding: weighted_sums.Rounding = "double" if is_double else "fixed"
    return weighted_sums.prepare_sums(a, channels, rounding, None if is_paired else "up")


def _emit_product(
    e: Emission, x: int, end: int, arrange: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Add an operator that multiplies the last axis of `x` by weights. The output is tensor `end`.

    `arrange` converts the layer's weights to the shape [output, input].
    """
    if _is_fully_connected(e.attributes, e.wide):
        e.add(
            "FULLY_CONNECTED",
            [x, *weighted_sums.weight_constants(e, arrange, 0)],
            [end],
            fusedActivationFunction=e.activation,
            keepNumDims=len(e.shape(x)) > 2,
        )
    else:
        weights = weighted_sums.weight_constants(e, lambda q: arrange(q)[:, None, None], 0)
        emit_on_images(e, "CONV_2D", [x, *weights], end, **ONE_PIXEL)


def _find_sizes(x: tf.Tensor) -> list[int | tf.Tensor]:
    """Return the sizes of `x` as a shape for `tf.reshape`, which accepts only one -1."""
    known = x.shape.as_list()
    now = tf.unstack(tf.shape(x)) if known.count(None) > 1 else [-1] * len(known)
    return [now[axis] if size is None else size for axis, size in enumerate(known)]


DENSE = Op(
    "dense",
    lambda a: compute_weighted(a, multiply),
    lambda e: _emit_product(e, e.inputs[0], e.outputs[0], lambda q: q.T),
    prepare=lambda a: _prepare(a, (-1,)),
    doc="products with a matrix along the last axis",
    layers=(layers.Dense, COMPUTED[layers.Dense]),
    attributes=lambda call: {"form": FORM},
    defaults={"form": FORM},
    integers=(),
    weights={"kernel": (-1,)},
    supports_int4=True,
    folds_batch_norm=True,
    can_merge_relu=True,
    products=lambda call: multiply_sizes((call.output.elements, call.inputs[0].shape[-1])),
)


# EinsumDense. Only the input has the axes `rows`. Only the weights have the axes `columns`.


def _read_einsum(call: Call) -> Attributes:
    """Return the attributes of an EinsumDense. Replace "..." in its equation by letters."""
    layer = call.layer
    equation = layer.equation.replace(" ", "")
    inputs, weights, _ = terms = re.split(",|->", equation)
    if "..." in inputs and "." not in weights:
        first, *other_terms = expand_ellipsis(terms, len(call.inputs[0].shape) + 3 - len(inputs))
        equation = f"{first},{'->'.join(other_terms)}"
    return {"equation": equation, "bias_axes": layer.bias_axes or "", "form": FORM}


def _accepts_einsum(call: Call, attributes: Attributes) -> str | None:
    axes = parse_equation(attributes["equation"])
    if not (axes.are_matrices and axes.sum_axes and axes.columns) or axes.batch:
        return f"{attributes['equation']} is not a product with a matrix"
    sizes = dict(zip(axes.output, call.output.shape, strict=True))
    if any(axis in axes.rows and sizes[axis] != 1 for axis in attributes["bias_axes"]):
        return "its bias has axes that its weights lack"
    return None


def _accept_per_channel(count: int, call: Call, attributes: Attributes) -> str | None:
    """Accept an equation if only the last `count` axes of the weights are axes of the output.

    In "abc,cd->abd", for example, only the last axis "d" of the weights is an axis of the output.
    With a bias, the output must end with these axes. See also `EINSUM_DENSE_PER_TENSOR`.
    """
    reason = _accepts_einsum(call, attributes)
    if reason is not None:
        return reason
    axes, bias_axes = parse_equation(attributes["equation"]), attributes["bias_axes"]
    is_last = len(axes.result) == count and axes.second.endswith(axes.result)
    is_whole = axes.output.endswith(axes.result) and set(bias_axes) == set(axes.result)
    return None if is_last and (is_whole or not bias_axes) else ""


def _prepare_einsum(a: Arguments) -> Sums:
    axes = parse_equation(a.attributes["equation"])
    weights = _expand_bias(a.weights, axes, a.attributes)
    columns = math.prod(_find_result_sizes(axes, weights.q))
    make: Any = np if isinstance(weights.q, np.ndarray) else tf
    q = make.transpose(weights.q, find_positions(axes.sum_axes + axes.result, axes.second))
    weights = dataclasses.replace(weights, q=make.reshape(q, (-1, columns)))
    return _prepare(dataclasses.replace(a, weights=weights), (-1,))


def _compute_einsum(a: Arguments) -> tf.Tensor:
    axes = parse_equation(a.attributes["equation"])
    x = transpose(a.q[0], find_positions(axes.rows + axes.sum_axes, axes.first))
    flat = tf.reshape(x, [-1, a.prepared.kernel.shape[0]])
    y = compute_weighted(dataclasses.replace(a, q=[flat]), tf.matmul)
    sizes = dict(zip(axes.output, a.call.output.shape, strict=True))
    stay = _find_sizes(x)[: len(axes.rows)]
    y = tf.reshape(y, [*stay, *(sizes[axis] for axis in axes.result)])
    return transpose(y, find_positions(axes.output, axes.rows + axes.result))


def _find_result_sizes(axes: Axes, kernel: np.ndarray | tf.Tensor) -> tuple[int, ...]:
    return tuple(kernel.shape[index] for index in find_positions(axes.result, axes.second))


def _expand_bias(weights: Weights, axes: Axes, attributes: Attributes) -> Weights:
    """Broadcast the bias to a vector with one value for each column of the weight matrix."""
    if weights.bias is None:
        return weights
    make = np if isinstance(weights.bias, np.ndarray) else tf
    sizes = _find_result_sizes(axes, weights.q)
    of_axes = zip(axes.result, sizes, strict=True)
    shape = [size if axis in attributes["bias_axes"] else 1 for axis, size in of_axes]
    bias: Any = make.broadcast_to(make.reshape(weights.bias, shape), sizes)
    return dataclasses.replace(weights, bias=make.reshape(bias, [-1]))


def _emit_einsum(e: Emission) -> None:
    axes = parse_equation(e.attributes["equation"])
    order, sizes = (
        find_positions(axes.sum_axes + axes.result, axes.second),
        _find_result_sizes(axes, e.weights.q),
    )
    depth = e.weights.q.size // math.prod(sizes)
    x = e.transpose(e.inputs[0], find_positions(axes.rows + axes.sum_axes, axes.first))
    stay = e.shape(x)[: len(axes.rows)]
    x = e.make_reshaped(x, (*stay, depth), "flat")
    weights = _expand_bias(e.weights, axes, e.attributes)
    inner = dataclasses.replace(e, node=dataclasses.replace(e.node, weights=weights))

    def add(target: int) -> None:
        _emit_product(inner, x, target, lambda q: q.transpose(order).reshape(depth, -1).T)

    final = find_positions(axes.output, axes.rows + axes.result)
    emit_product(e, add, (*stay, math.prod(sizes)), (*stay, *sizes), final)


def _count_einsum(call: Call) -> int | None:
    axes = parse_equation(_read_einsum(call)["equation"])
    sizes = dict(zip(axes.first, call.inputs[0].shape, strict=True))
    return multiply_sizes((call.output.elements, *(sizes[axis] for axis in axes.sum_axes)))


EINSUM_DENSE = dataclasses.replace(
    DENSE,
    name="einsum_dense",
    prepare=_prepare_einsum,
    compute=_compute_einsum,
    emit=_emit_einsum,
    doc="products with a matrix, along any axes",
    layers=(layers.EinsumDense,),
    attributes=_read_einsum,
    defaults={},
    accepts=partial(_accept_per_channel, 1),
    folds_batch_norm=False,
    products=_count_einsum,
)

EINSUM_DENSE_HEADS = dataclasses.replace(
    EINSUM_DENSE,
    name="einsum_dense_heads",
    doc="products with a matrix whose columns become two axes, such as attention heads",
    accepts=partial(_accept_per_channel, 2),
    weights={"kernel": (-2, -1)},
)

EINSUM_DENSE_PER_TENSOR = dataclasses.replace(
    EINSUM_DENSE,
    name="einsum_dense_per_tensor",
    doc="all other products with a matrix, with one scale for all weights",
    accepts=_accepts_einsum,
    weights={"kernel": ()},
)
