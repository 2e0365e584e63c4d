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
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call
from keras_qat.ops.images import from_image, image_of
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.runtime import RECENT
from keras_qat.ops.sums import Rounding, weight_constants, weighted
from keras_qat.tflite.emission import Emission

__all__ = ["DENSE", "EINSUM_DENSE", "EINSUM_DENSE_HEADS", "EINSUM_DENSE_PER_TENSOR", "product"]

_layers = keras.layers

FORM = "fully_connected" if RECENT else "convolution"
"""The form of layers; their attribute `form` can say otherwise."""


def _is_fully_connected(attributes: Attributes, wide: bool) -> bool:
    return attributes["form"] == "fully_connected" and not wide


def _rounding(a: Arguments) -> Rounding:
    return "double" if _is_fully_connected(a.attributes, a.wide) else "fixed"


def product(x: Any, kernel: Any) -> Any:
    """The product with a matrix along the last axis."""
    return tf.matmul(x, kernel) if x.shape.rank == 2 else tf.tensordot(x, kernel, 1)


def _dense(a: Arguments) -> Any:
    return weighted(a, product, (-1,), _rounding(a))


def _emit_dense(e: Emission) -> None:
    _emit_product(e, e.inputs[0], e.outputs[0], lambda q: q.T)


def _emit_product(e: Emission, x: int, end: int, arrange: Any) -> None:
    """The product along the last axis of a tensor; `arrange` gives weights [output, input]."""
    if _is_fully_connected(e.attributes, e.wide):
        e.add(
            "FULLY_CONNECTED",
            [x, *weight_constants(e, arrange, 0)],
            [end],
            "FullyConnectedOptions",
            fusedActivationFunction=e.activation,
            keepNumDims=len(e.shape(x)) > 2,
        )
        return
    weights = weight_constants(e, lambda q: arrange(q)[:, None, None], 0)
    image, finish = from_image(e, end)
    e.add(
        "CONV_2D",
        [image_of(e, x), *weights],
        [image],
        "Conv2DOptions",
        padding=schema.Padding.VALID,
        strideH=1,
        strideW=1,
        fusedActivationFunction=e.activation,
    )
    finish()


DENSE = Op(
    "dense",
    _dense,
    _emit_dense,
    doc="products with a matrix along the last axis",
    layers=(_layers.Dense,),
    attributes=lambda call: {"form": FORM},
    defaults={"form": FORM},
    weights={"kernel": (-1,)},
    folds_batch_norm=True,
    takes_clip=True,
)


# EinsumDense. Its axes are of three kinds: those that stay, which input and output have; those that
# are summed, which input and weights have; those of the result, which weights and output have.


def _einsum_attributes(call: Call) -> Attributes:
    """Places of axes.

    `input`: of the input's axes those that stay, then the summed ones. `weights`: the summed ones,
    then those of the result. `output`: for each axis of the output its place among those that stay
    and those of the result. `summed`, `result`: how many. Without them it is no product with a
    matrix.
    """
    layer = call.layer
    equation = layer.equation.replace(" ", "")
    x, weights, output = re.split(",|->", equation)
    if "..." in equation:
        rank = len(call.inputs[0].shape)
        dots = "".join(map(chr, range(0x3B1, 0x3B1 + rank + 3 - len(x))))
        x, output = x.replace("...", dots), output.replace("...", dots)
    found: dict[str, Any] = {"equation": equation, "form": FORM}
    summed = [axis for axis in weights if axis not in output]
    result = [axis for axis in output if axis in weights]
    stay = [axis for axis in x if axis not in weights]
    if "." in weights or set(result) & set(x) or set(output) != {*stay, *result}:
        return found
    if any(len(set(axes)) < len(axes) for axes in (x, weights, output)) or not result:
        return found
    if not summed or set(summed) - set(x):
        return found
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
        "input": tuple(map(x.index, [*stay, *summed])),
        "weights": tuple(map(weights.index, [*summed, *result])),
        "output": tuple(map([*stay, *result].index, output)),
        "summed": len(summed),
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


def _einsum_per_channel(axes: int) -> Any:
    """`accepts` where the last axes of the weights, so many, are those of the result, in order.

    Others are left to the row with one scale for all weights.
    """

    def accepts(call: Call, attributes: Attributes) -> str | None:
        reason = _einsum_accepts(call, attributes)
        if reason is not None:
            return reason
        if attributes["result"] != axes or list(attributes["weights"]) != sorted(
            attributes["weights"]
        ):
            return ""
        if attributes["bias"] not in (None, attributes["sizes"]):
            return ""
        return None

    return accepts


def _einsum(a: Arguments) -> Any:
    given = a.attributes
    summed = given["summed"]

    def linear(x: Any, kernel: Any) -> Any:
        shape = tuple(kernel.shape)
        rows = math.prod(shape[axis] for axis in given["weights"][:summed])
        columns = tf.reshape(tf.transpose(kernel, given["weights"]), [rows, -1])
        x = tf.transpose(x, given["input"])
        return product(tf.reshape(x, [*_sizes(x)[: x.shape.rank - summed], rows]), columns)

    weights = dataclasses.replace(a.weights, bias=_full_bias(given, a.weights.bias))
    channels = tuple(each - len(given["weights"]) for each in given["weights"][summed:])
    y = weighted(dataclasses.replace(a, weights=weights), linear, channels, _rounding(a))
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
    given, weights = e.attributes, e.node.weights
    assert weights is not None
    summed, order = given["summed"], given["weights"]
    shape = weights.q.shape
    rows = math.prod(shape[axis] for axis in order[:summed])
    x = _transposed(e, e.inputs[0], given["input"], "input")
    stay = e.shape(x)[: len(given["input"]) - summed]
    if summed > 1:
        flat = e.temporary("flat", (*stay, rows), x)
        e.reshape(x, flat)
        x = flat
    in_order = list(given["output"]) == sorted(given["output"])
    end = e.outputs[0]
    whole = (*stay, *given["sizes"])
    last = end if in_order else e.temporary("in_order", whole, end)
    end_of_product = last
    if len(given["sizes"]) > 1:
        end_of_product = e.temporary("product", (*stay, math.prod(given["sizes"])), end)
    node = dataclasses.replace(
        e.node, weights=dataclasses.replace(weights, bias=_full_bias(given, weights.bias))
    )
    inner = dataclasses.replace(e, node=node)
    _emit_product(inner, x, end_of_product, lambda q: q.transpose(order).reshape(rows, -1).T)
    if end_of_product != last:
        e.reshape(end_of_product, last)
    if last != end:
        _transpose(e, last, end, given["output"], "output")


def _transposed(e: Emission, source: int, order: tuple[int, ...], name: str) -> int:
    if list(order) == sorted(order):
        return source
    shape = e.shape(source)
    target = e.temporary(name, tuple(shape[axis] for axis in order), source)
    _transpose(e, source, target, order, name)
    return target


def _transpose(e: Emission, source: int, target: int, order: tuple[int, ...], name: str) -> None:
    axes = e.constant(f"{name}_order", np.array(order, np.int32))
    e.add("TRANSPOSE", [source, axes], [target], "TransposeOptions")


EINSUM_DENSE = Op(
    "einsum_dense",
    _einsum,
    _emit_einsum,
    doc="products with a matrix, along any axes",
    layers=(_layers.EinsumDense,),
    attributes=_einsum_attributes,
    accepts=_einsum_per_channel(1),
    weights={"kernel": (-1,)},
    takes_clip=True,
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
