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
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import keras
from keras_qat.ops.einsum import Axes, add_product, places, without_ellipsis
from keras_qat.ops.emission import Emission
from keras_qat.ops.image_shapes import ONE_PIXEL, add_on_images
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.weighted_sums import (
    RECENT,
    Rounding,
    Sums,
    prepare_sums,
    products_with_weights,
    weight_constants,
    weighted,
)
from keras_qat.ops.weights import terms

if TYPE_CHECKING:
    from keras_qat.ops.node import Node

__all__ = ["DENSE", "EINSUM_DENSE", "EINSUM_DENSE_HEADS", "EINSUM_DENSE_PER_TENSOR", "product"]

_layers = keras.layers

FORM = "fully_connected" if RECENT else "convolution"
"""The form of layers; their attribute `form` can say otherwise."""


def _is_fully_connected(attributes: Attributes, wide: bool) -> bool:
    return attributes["form"] == "fully_connected" and not wide


def product(x: Any, kernel: Any) -> Any:
    """The product with a matrix along the last axis."""
    return tf.matmul(x, kernel) if x.shape.rank == 2 else tf.tensordot(x, kernel, 1)


def _prepare(a: Arguments, channels: tuple[int, ...]) -> Sums:
    is_connected = _is_fully_connected(a.attributes, a.wide)
    is_double = is_connected and a.family.dense == "double"
    # XNNPACK's weights of 4 bits are pairs.
    is_paired = is_connected and terms(tuple(a.weights.q.shape), channels) % 2 == 0
    rounding: Rounding = "double" if is_double else "fixed"
    return prepare_sums(a, channels, rounding, of_int4=None if is_paired else "up")


def _dense(a: Arguments) -> Any:
    return weighted(a, product, (-1,))


def _emit_dense(e: Emission) -> None:
    _emit_product(e, e.inputs[0], e.outputs[0], lambda q: q.T)


def _emit_product(e: Emission, x: int, end: int, arrange: Any) -> None:
    """The product along the last axis of a tensor; `arrange` gives weights [output, input]."""
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
        add_on_images(e, "CONV_2D", [x, *weights], end, **ONE_PIXEL)


DENSE = Op(
    "dense",
    _dense,
    _emit_dense,
    prepare=lambda a: _prepare(a, (-1,)),
    doc="products with a matrix along the last axis",
    layers=(_layers.Dense,),
    attributes=lambda call: {"form": FORM},
    defaults={"form": FORM},
    integers=(),
    weights={"kernel": (-1,)},
    takes_int4=True,
    folds_batch_norm=True,
    takes_clip=True,
    products=products_with_weights,
)


# EinsumDense. Rows of the matrices are axes that stay, columns those of the result.


def _einsum_attributes(call: Call) -> Attributes:
    """Places of axes.

    `input`: of the input's axes those that stay, then the summed ones. `weights`: the summed ones,
    then those of the result. `output`: for each axis of the output its place among those that stay
    and those of the result. `summed`, `result`: how many. Without them it is no product with a
    matrix.
    """
    layer = call.layer
    equation = layer.equation.replace(" ", "")
    terms = re.split(",|->", equation)
    axes = Axes(*without_ellipsis(terms, len(call.inputs[0].shape) + 3 - len(terms[0])))
    found: dict[str, Any] = {"equation": equation, "form": FORM}
    is_product = axes.are_matrices and axes.summed and axes.columns and not axes.batch
    if not is_product or "." in terms[1]:
        return found
    output, weights = axes.output, axes.second
    result = "".join(axis for axis in output if axis in weights)
    # By the call, as the layer may be one that is not built yet.
    sizes = dict(zip(output, call.output.shape, strict=True))
    if getattr(layer, "kernel", None) is not None:
        sizes |= {axis: layer.kernel.shape[weights.index(axis)] for axis in result}
    bias = None
    if layer.bias_axes is not None:
        first = min(map(output.index, layer.bias_axes))
        bias = tuple(sizes[axis] if axis in layer.bias_axes else 1 for axis in output[first:])
    return {
        **found,
        "input": places(axes.rows + axes.summed, axes.first),
        "weights": places(axes.summed + result, weights),
        "output": places(output, axes.rows + result),
        "summed": len(axes.summed),
        "result": len(result),
        "bias": bias,
        "sizes": tuple(sizes[axis] for axis in result),
    }


def _einsum_accepts(call: Call, attributes: Attributes) -> str | None:
    if "summed" not in attributes:
        return f"{attributes['equation']} is no product with a matrix"
    bias, stay = attributes["bias"], len(attributes["output"]) - attributes["result"]
    if bias is not None:
        axes = attributes["output"][len(attributes["output"]) - len(bias) :]
        if any(size > 1 and axis < stay for size, axis in zip(bias, axes, strict=True)):
            return "its bias differs along other axes than the weights'"
    return None


def _einsum_per_channel(count: int) -> Any:
    """`accepts` where the last axes of the weights, so many, are those of the result, in order.

    Others are left to the row with one scale for all weights.
    """

    def accepts(call: Call, attributes: Attributes) -> str | None:
        reason = _einsum_accepts(call, attributes)
        if reason is not None:
            return reason
        axes = attributes["weights"]
        last = tuple(range(len(axes) - count, len(axes)))
        is_last = attributes["result"] == count and axes[-count:] == last
        return None if is_last and attributes["bias"] in (None, attributes["sizes"]) else ""

    return accepts


def _einsum_channels(given: Attributes) -> tuple[int, ...]:
    return tuple(each - len(given["weights"]) for each in given["weights"][given["summed"] :])


def _prepare_einsum(a: Arguments) -> Sums:
    weights = dataclasses.replace(a.weights, bias=_full_bias(a.attributes, a.weights.bias))
    return _prepare(dataclasses.replace(a, weights=weights), _einsum_channels(a.attributes))


def _einsum(a: Arguments) -> Any:
    given = a.attributes
    summed = given["summed"]

    def linear(x: Any, kernel: Any) -> Any:
        shape = tuple(kernel.shape)
        rows = math.prod(shape[axis] for axis in given["weights"][:summed])
        columns = tf.reshape(tf.transpose(kernel, given["weights"]), [rows, -1])
        x = tf.transpose(x, given["input"])
        return product(tf.reshape(x, [*_sizes(x)[: x.shape.rank - summed], rows]), columns)

    y = weighted(a, linear, _einsum_channels(given))
    y = tf.reshape(y, [*_sizes(y)[:-1], *given["sizes"]])
    return tf.transpose(y, given["output"])


def _sizes(x: Any) -> list[Any]:
    """The sizes of a tensor's axes, numbers where they are known."""
    return [tf.shape(x)[axis] if size is None else size for axis, size in enumerate(x.shape)]


def _full_bias(given: Attributes, bias: Any) -> Any:
    """A bias with a number for each entry of the result's axes; None stays."""
    if bias is None:
        return None
    make = np if isinstance(bias, np.ndarray) else tf
    stay = len(given["output"]) - given["result"]
    shape = (1,) * (len(given["output"]) - len(given["bias"])) + given["bias"]
    order = [given["output"].index(axis) for axis in range(len(given["output"]))]
    moved = make.transpose(make.reshape(bias, shape), order)
    within = make.reshape(moved, tuple(moved.shape)[stay:])
    return make.reshape(make.broadcast_to(within, given["sizes"]), [-1])


def _emit_einsum(e: Emission) -> None:
    given, weights = e.attributes, e.weights
    order, summed = given["weights"], given["summed"]
    rows = math.prod(weights.q.shape[axis] for axis in order[:summed])
    x = e.transpose(e.inputs[0], given["input"])
    stay = e.shape(x)[: len(given["input"]) - summed]
    x = e.reshaped(x, (*stay, rows), "flat")
    weights = dataclasses.replace(weights, bias=_full_bias(given, weights.bias))
    inner = dataclasses.replace(e, node=dataclasses.replace(e.node, weights=weights))

    def add(target: int) -> None:
        _emit_product(inner, x, target, lambda q: q.transpose(order).reshape(rows, -1).T)

    sizes = given["sizes"]
    add_product(e, add, (*stay, math.prod(sizes)), (*stay, *sizes), given["output"])


def _products_einsum(node: Node) -> int:
    """Counts products: each output number is a sum over the summed axes of the weights."""
    assert node.weights is not None
    summed = node.attributes["weights"][: node.attributes["summed"]]
    return node.output.elements * math.prod(node.weights.q.shape[axis] for axis in summed)


EINSUM_DENSE = Op(
    "einsum_dense",
    _einsum,
    _emit_einsum,
    prepare=_prepare_einsum,
    doc="products with a matrix, along any axes",
    layers=(_layers.EinsumDense,),
    attributes=_einsum_attributes,
    accepts=_einsum_per_channel(1),
    integers=(),
    weights={"kernel": (-1,)},
    takes_int4=True,
    takes_clip=True,
    products=_products_einsum,
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
