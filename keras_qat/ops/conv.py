"""Convolutions along one or two axes: CONV_2D, DEPTHWISE_CONV_2D and TRANSPOSE_CONV.

A 1x1 DEPTHWISE_CONV_2D also computes layers like BatchNormalization, which multiply each channel by
a factor and add an offset.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.graph.calls import Call, multiply_sizes
from keras_qat.helper_layers import keras_variants
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import (
    ONE_PIXEL,
    Emission,
    as_image,
    as_pair,
    emit_from_image,
    emit_on_images,
    make_image_output,
)
from keras_qat.ops.node import Node
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.weighted_sums import (
    RECENT,
    Sums,
    compute_weighted,
    prepare_sums,
    weight_constants,
)
from keras_qat.tflite.schema import TYPES


def _attributes(call: Call) -> Attributes:
    layer = call.layer
    return {
        "strides": tuple(layer.strides),
        "padding": layer.padding,
        "dilation": tuple(layer.dilation_rate),
        "data_format": layer.data_format,
    }


def _accepts(call: Call, attributes: Attributes) -> str | None:
    if attributes["data_format"] == "channels_first":
        return "its channels come first"
    rank = len(call.output.shape)
    return None if rank in (3, 4) else f"it has {rank - 2} spatial axes"


def _count_causal_padding(a: Attributes, steps: int) -> int:
    return (steps - 1) * as_pair(a["dilation"])[1] if a["padding"] == "causal" else 0


def _get_padding(a: Attributes) -> str:
    return "SAME" if a["padding"] == "same" else "VALID"


def _for_sequences(function: Callable[..., Any]) -> Callable[[Attributes, Any, Any], Any]:
    """Return a convolution that treats a sequence as an image of height 1."""

    @functools.wraps(function)
    def compute(a: Attributes, x: Any, kernel: Any) -> Any:
        if x.shape.rank == 4:
            return function(a, x, kernel)
        return tf.squeeze(function(a, tf.expand_dims(x, 1), tf.expand_dims(kernel, 0)), 1)

    return compute


@_for_sequences
def convolve(a: Attributes, x: Any, kernel: Any) -> Any:
    padding: Any = _get_padding(a)
    if left := _count_causal_padding(a, kernel.shape[1]):
        padding = [[0, 0], [0, 0], [left, 0], [0, 0]]
    return tf.nn.conv2d(x, kernel, as_pair(a["strides"]), padding, dilations=as_pair(a["dilation"]))


@_for_sequences
def convolve_as_matrices(a: Attributes, x: Any, kernel: Any) -> Any:
    """Computes `convolve` as one matrix product of image patches and weights, without groups.

    For a kernel of 3x3 pixels, the patches need nine times the memory of the images.
    """
    *sizes, inputs, outputs = kernel.shape
    sides, spans = [], []
    axes = zip(sizes, as_pair(a["strides"]), as_pair(a["dilation"]), strict=True)
    for axis, (size, stride, dilation) in enumerate(axes, 1):
        length = x.shape[axis] if x.shape[axis] is not None else tf.shape(x)[axis]
        reach = (size - 1) * dilation
        before, after = (_count_causal_padding(a, size) if axis == 2 else 0), 0
        if _get_padding(a) == "SAME":
            most = max if isinstance(length, int) else tf.maximum
            missing = most((length - 1) // stride * stride + reach + 1 - length, 0)
            before, after = missing // 2, missing - missing // 2
        last = (length + before + after - reach - 1) // stride * stride
        sides.append([before, after])
        first = [pixel * dilation for pixel in range(size)]
        spans.append([slice(start, start + last + 1, stride) for start in first])
    padded = tf.pad(x, [[0, 0], *sides, [0, 0]])
    patches = [padded[:, rows, columns] for rows in spans[0] for columns in spans[1]]
    matrix = tf.reshape(kernel, [1, 1, math.prod(sizes) * inputs, outputs])
    return tf.nn.conv2d(tf.concat(patches, -1), matrix, 1, "VALID")


def convolve_by_channel(a: Attributes, x: Any, kernel: Any) -> Any:
    if x.shape.rank == 3:  # TensorFlow requires equal strides. Images of height 1 ignore the first.
        a = {**a, "strides": as_pair(a["strides"])[1]}
    return _convolve_images_by_channel(a, x, kernel)


@_for_sequences
def _convolve_images_by_channel(a: Attributes, x: Any, kernel: Any) -> Any:
    strides = [1, *as_pair(a["strides"]), 1]
    return tf.nn.depthwise_conv2d(
        x, kernel, strides, _get_padding(a), dilations=as_pair(a["dilation"])
    )


def _make_options(e: Emission) -> dict[str, Any]:
    (high, wide), (rows, columns) = (
        as_pair(e.attributes[name]) for name in ("strides", "dilation")
    )
    is_sequence = len(e.shape(e.inputs[0])) == 3
    return {
        "padding": getattr(schema.Padding, _get_padding(e.attributes)),
        "strideH": 1 if is_sequence else high,
        "strideW": wide,
        "dilationHFactor": 1 if is_sequence else rows,
        "dilationWFactor": columns,
    }


def _emit_conv(e: Emission) -> None:
    x = e.inputs[0]
    if left := _count_causal_padding(e.attributes, e.weights.q.shape[0]):
        x = as_image(e, x)
        batch, height, width, channels = e.shape(x)
        width = None if width is None else width + left
        padded = e.temporary("padded", (batch, height, width, channels), x)
        pads = e.constant("pads", [[0, 0], [0, 0], [left, 0], [0, 0]])
        e.add("PAD", [x, pads], [padded])
        x = padded
    weights = weight_constants(
        e, lambda q: (q[None] if q.ndim == 3 else q).transpose(3, 0, 1, 2), 0
    )
    emit_on_images(e, "CONV_2D", [x, *weights], **_make_options(e))


def _emit_depthwise(e: Emission) -> None:
    def arrange(q: np.ndarray) -> np.ndarray:
        return q.reshape(1, *(1,) * (4 - q.ndim), *q.shape[:-2], -1)

    inputs = [e.inputs[0], *weight_constants(e, arrange, 3)]
    multiplier = int(e.weights.q.shape[-1])
    emit_on_images(e, "DEPTHWISE_CONV_2D", inputs, depthMultiplier=multiplier, **_make_options(e))


def _find_kernel_size(call: Call) -> tuple[int, ...]:
    """Return `kernel_size`. For custom layers without it, return the first sizes of the weights."""
    layer = call.layer
    return layer.kernel_size if hasattr(layer, "kernel_size") else layer.weights[0].shape[:-2]


def _count(call: Call) -> int | None:
    axis = 1 if getattr(call.layer, "data_format", "") == "channels_first" else -1
    products = multiply_sizes(
        (call.output.elements, *_find_kernel_size(call), call.inputs[0].shape[axis])
    )
    return products and products // getattr(call.layer, "groups", 1)


def _list_with_computed(*kinds: type) -> tuple[type, ...]:
    return *kinds, *(keras_variants.COMPUTED[kind] for kind in kinds)


CONV = Op(
    "conv",
    lambda a: compute_weighted(
        a, partial(convolve, a.attributes), partial(convolve_as_matrices, a.attributes)
    ),
    _emit_conv,
    prepare=lambda a: prepare_sums(
        a, (-1,), of_int4="up" if a.weights.q.shape[-2] == a.q[0].shape[-1] else "fixed"
    ),
    doc="convolutions along one axis or two, with groups, strides and dilation",
    layers=_list_with_computed(layers.Conv1D, layers.Conv2D),
    attributes=_attributes,
    defaults={"strides": 1, "padding": "valid", "dilation": 1, "data_format": "channels_last"},
    accepts=_accepts,
    integers=(),
    weights={"kernel": (-1,)},
    supports_int4=True,
    folds_batch_norm=True,
    can_merge_relu=True,
    products=_count,
)

DEPTHWISE_CONV = dataclasses.replace(
    CONV,
    name="depthwise_conv",
    prepare=lambda a: prepare_sums(a, (-2, -1)),
    compute=lambda a: compute_weighted(a, partial(convolve_by_channel, a.attributes)),
    emit=_emit_depthwise,
    doc="convolutions of each channel separately",
    layers=(layers.DepthwiseConv1D, *_list_with_computed(layers.DepthwiseConv2D)),
    weights={"depthwise_kernel": (-2, -1)},
    products=lambda call: multiply_sizes((call.output.elements, *_find_kernel_size(call))),
    # TFLite's reference kernels refuse 4-bit weights, and CMSIS-NN computes some layers wrongly.
    supports_int4=False,
)


def _transpose_attributes(call: Call) -> Attributes:
    added = call.layer.output_padding
    return {**_attributes(call), "output_padding": None if added is None else tuple(added)}


def _accepts_transpose(call: Call, attributes: Attributes) -> str | None:
    if attributes["data_format"] == "channels_first":
        return "its channels come first"
    return "it has a dilation" if max(as_pair(attributes["dilation"])) > 1 else None


def _find_sizes(a: Attributes, kernel: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (factor, offset) for height and width: output size = factor * input size + offset."""
    added = a["output_padding"]
    sizes = []
    for axis, stride in enumerate(_get_strides(a, len(kernel) == 3)):
        size = kernel[axis] if len(kernel) == 4 else (1, kernel[0])[axis]
        if added is None or size == stride == 1:
            more = max(size - stride, 0) if a["padding"] == "valid" else 0
        else:
            ends = 0 if a["padding"] == "valid" else 2 * (size // 2)
            more = size - ends - stride + (0, *added)[len(added) - 1 + axis]
        sizes.append((stride, more))
    return sizes


def _get_strides(a: Attributes, is_sequence: bool) -> tuple[int, int]:
    height, width = as_pair(a["strides"])
    return (1, width) if is_sequence else (height, width)


def convolve_transposed(a: Attributes, x: Any, kernel: Any) -> Any:
    is_sequence, factors = len(kernel.shape) == 3, _find_sizes(a, tuple(kernel.shape))
    if is_sequence:
        x, kernel = tf.expand_dims(x, 1), tf.expand_dims(kernel, 0)
    before = tf.shape(x)
    sizes = [
        (before[axis] if x.shape[axis] is None else x.shape[axis]) * times + more
        for axis, (times, more) in enumerate(factors, 1)
    ]
    shape = tf.stack([before[0], *sizes, kernel.shape[2]])
    strides = _get_strides(a, is_sequence)
    y = tf.nn.conv2d_transpose(x, kernel, shape, strides, a["padding"].upper())
    known = [tf.get_static_value(size) for size in sizes]
    y = tf.ensure_shape(y, [x.shape[0], *known, kernel.shape[2]])
    return tf.squeeze(y, 1) if is_sequence else y


def _is_known(node: Arguments | Node) -> bool:
    """Return True if the output shape is known. A batch size that files fix counts as known.

    XNNPACK runs a TRANSPOSE_CONV only if its output shape is constant.
    """
    shape = node.call.output.shape
    return None not in (shape[1:] if node.sized else shape)


def _prepare_transpose(a: Arguments) -> Sums:
    is_fixed = _is_known(a) and (RECENT or not a.weights.per_channel)
    return prepare_sums(a, (-2,), "fixed" if is_fixed else "eights")


def _emit_transpose(e: Emission) -> None:
    x, image = as_image(e, e.inputs[0]), make_image_output(e, e.outputs[0])
    weights, bias = weight_constants(
        e, lambda q: (q[None] if q.ndim == 3 else q).transpose(2, 0, 1, 3), 0
    )
    height, width = _get_strides(e.attributes, e.weights.q.ndim == 3)
    e.add(
        "TRANSPOSE_CONV",
        [_emit_output_shape(e, x, image), weights, x, bias],
        [image],
        padding=getattr(schema.Padding, e.attributes["padding"].upper()),
        strideH=height,
        strideW=width,
        fusedActivationFunction=e.activation,
    )
    emit_from_image(e, image, e.outputs[0])


def _emit_output_shape(e: Emission, x: int, image: int) -> int:
    """Return a tensor with the output's shape. Compute it from `x` if it is not known.

    If the file knows the shape, but the model does not, also compute it. With a constant shape,
    XNNPACK would run the operator, and would round differently from the model.
    """
    shape = e.shape(image)
    if None not in shape and _is_known(e.node):
        return e.constant("output_shape", shape)
    (high, more_high), (wide, more_wide) = _find_sizes(e.attributes, tuple(e.weights.q.shape))
    times = e.constant("times", [1, high, wide, 0])
    more = e.constant("more", [0, more_high, more_wide, shape[3]])
    before, product, sizes = (
        e.temporary(name, (4,), "int32") for name in ("shape", "product", "output_shape")
    )
    e.add("SHAPE", [x], [before], outType=TYPES["int32"])
    e.add("MUL", [before, times], [product])
    e.add("ADD", [product, more], [sizes], potScaleInt16=False)
    return sizes


def _count_transposed(call: Call) -> int | None:
    return multiply_sizes(
        (call.inputs[0].elements, *_find_kernel_size(call), call.output.shape[-1])
    )


TRANSPOSE_CONV = dataclasses.replace(
    CONV,
    name="transpose_conv",
    prepare=_prepare_transpose,
    compute=lambda a: compute_weighted(a, partial(convolve_transposed, a.attributes)),
    emit=_emit_transpose,
    doc="transposed convolutions along one axis or two",
    layers=_list_with_computed(layers.Conv1DTranspose, layers.Conv2DTranspose),
    attributes=_transpose_attributes,
    defaults={**CONV.defaults, "output_padding": None},
    accepts=_accepts_transpose,
    weights={"kernel": (-2,)},
    supports_int4=False,
    products=_count_transposed,
)


def _affine_attributes(call: Call) -> Attributes:
    """Return the axes along which a layer has different factors, such as (3,) for channels."""
    rank, axes = len(call.output.shape), tf.nest.flatten([getattr(call.layer, "axis", -1)])
    return {"axes": tuple(int(axis) % max(rank, 1) for axis in axes if axis is not None)}


def _accepts_affine(call: Call, attributes: Attributes) -> str | None:
    last = len(call.output.shape) - 1
    if call.output.shape[-1:] == (None,):
        return "the number of channels is unknown"
    known = attributes["axes"] in ((), (last,))
    return None if last > 0 and known else "not one factor per channel"


def _emit_affine(e: Emission) -> None:
    inputs = [e.inputs[0], *weight_constants(e, lambda q: q.reshape(1, 1, 1, -1), 3)]
    emit_on_images(e, "DEPTHWISE_CONV_2D", inputs, depthMultiplier=1, **ONE_PIXEL)


AFFINE = Op(
    "affine",
    lambda a: compute_weighted(a, lambda x, factors: x * factors),
    _emit_affine,
    prepare=lambda a: prepare_sums(a, (-1,)),
    doc="x * factor + offset for each channel, such as a BatchNormalization that is not folded",
    layers=(
        *(layers.BatchNormalization, layers.Rescaling, layers.Normalization),
        *(keras_variants.RescaledBatchNormalization, keras_variants.RescaledNormalization),
    ),
    paths=("applications.convnext.LayerScale",),
    attributes=_affine_attributes,
    defaults={"axes": (-1,)},
    accepts=_accepts_affine,
    integers=(),
    weights={"": (-1,)},
    can_merge_relu=True,
)
