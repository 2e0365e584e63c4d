"""Transposed convolutions: TRANSPOSE_CONV, along one axis or two."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call
from keras_qat.ops.images import from_image, image_of, pair
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.runtime import RECENT
from keras_qat.ops.sums import weight_constants, weighted
from keras_qat.tflite.emission import Emission
from keras_qat.tflite.names import SCOPE

__all__ = ["TRANSPOSE_CONV", "transposed"]

_layers = keras.layers


def _attributes(call: Call) -> Attributes:
    layer = call.layer
    added = layer.output_padding
    return {
        "strides": tuple(layer.strides),
        "padding": layer.padding,
        "output_padding": None if added is None else tuple(added),
        "dilation": tuple(layer.dilation_rate),
        "data_format": layer.data_format,
    }


def _accepts(call: Call, attributes: Attributes) -> str | None:
    if attributes["data_format"] == "channels_first":
        return "its channels come first"
    if max(pair(attributes["dilation"])) > 1:
        return "it has a dilation"
    return None


def _sizes(a: Attributes, kernel: tuple[int, ...]) -> list[tuple[int, int]]:
    """For height and width what a size is multiplied by, and what is added to that."""
    added = a["output_padding"]
    found = []
    for axis, stride in enumerate(_strides(a, len(kernel) == 3)):
        size = kernel[axis] if len(kernel) == 4 else (1, kernel[0])[axis]
        if added is None or size == stride == 1:
            more = max(size - stride, 0) if a["padding"] == "valid" else 0
        else:
            ends = 0 if a["padding"] == "valid" else 2 * (size // 2)
            more = size - ends - stride + (0, *added)[len(added) - 1 + axis]
        found.append((stride, more))
    return found


def _strides(a: Attributes, is_sequence: bool) -> tuple[int, int]:
    height, width = pair(a["strides"])
    return (1, width) if is_sequence else (height, width)


def transposed(a: Attributes, x: Any, kernel: Any) -> Any:
    """A transposed convolution of numbers: one with the attributes of TRANSPOSE_CONV."""
    is_sequence, factors = len(kernel.shape) == 3, _sizes(a, tuple(kernel.shape))
    if is_sequence:
        x, kernel = tf.expand_dims(x, 1), tf.expand_dims(kernel, 0)
    before = tf.shape(x)
    sizes = [
        (before[axis] if x.shape[axis] is None else x.shape[axis]) * times + more
        for axis, (times, more) in enumerate(factors, 1)
    ]
    y = tf.nn.conv2d_transpose(
        x,
        kernel,
        tf.stack([before[0], *sizes, kernel.shape[2]]),
        _strides(a, is_sequence),
        a["padding"].upper(),
    )
    known = [tf.get_static_value(each) for each in sizes]
    y = tf.ensure_shape(y, [x.shape[0], *known, kernel.shape[2]])
    return tf.squeeze(y, 1) if is_sequence else y


def _compute(a: Arguments) -> Any:
    # XNNPACK takes those whose output's shape is known.
    is_known = None not in a.call.output.shape
    taken = is_known and (RECENT or not a.weights.per_channel)
    return weighted(a, partial(transposed, a.attributes), (-2,), "fixed" if taken else "eights")


def _emit(e: Emission) -> None:
    def arrange(q: np.ndarray) -> np.ndarray:
        return (q[None] if q.ndim == 3 else q).transpose(2, 0, 1, 3)

    assert e.node.weights is not None
    kernel = tuple(e.node.weights.q.shape)
    x = image_of(e, e.inputs[0])
    end, finish = from_image(e, e.outputs[0])
    strides = _strides(e.attributes, len(kernel) == 3)
    e.add(
        "TRANSPOSE_CONV",
        _with_shape(e, x, end, [x, *weight_constants(e, arrange, 0, takes_int4=False)]),
        [end],
        "TransposeConvOptions",
        padding=getattr(schema.Padding, e.attributes["padding"].upper()),
        strideH=strides[0],
        strideW=strides[1],
        fusedActivationFunction=e.activation,
    )
    finish()


def _with_shape(e: Emission, x: int, end: int, tensors: list[int]) -> list[int]:
    """The inputs of the operator: the shape of its output, weights, x, bias.

    An open shape is computed from that of x.
    """
    _, weights, bias = tensors
    shape = e.shape(end)
    if None not in shape:
        sizes = e.constant("output_shape", np.array(shape, np.int32))
        return [sizes, weights, x, bias]
    (high, more_high), (wide, more_wide) = _sizes(e.attributes, tuple(e.node.weights.q.shape))  # type: ignore[union-attr]
    times = e.constant("times", np.array([1, high, wide, 0], np.int32))
    more = e.constant("more", np.array([0, more_high, more_wide, shape[3]], np.int32))
    before, product, sizes = (
        e.builder.tensor(f"{SCOPE}/{e.node.name}/{name}", (4,), "int32")
        for name in ("shape", "product", "output_shape")
    )
    e.add("SHAPE", [x], [before], "ShapeOptions", outType=schema.TensorType.INT32)
    e.add("MUL", [before, times], [product], "MulOptions")
    e.add("ADD", [product, more], [sizes], "AddOptions", potScaleInt16=False)
    return [sizes, weights, x, bias]


TRANSPOSE_CONV = Op(
    "transpose_conv",
    _compute,
    _emit,
    doc="transposed convolutions along one axis or two",
    layers=(_layers.Conv1DTranspose, _layers.Conv2DTranspose),
    attributes=_attributes,
    defaults={
        "strides": 1,
        "padding": "valid",
        "output_padding": None,
        "dilation": 1,
        "data_format": "channels_last",
    },
    accepts=_accepts,
    weights={"kernel": (-2,)},
    folds_batch_norm=True,
    takes_clip=True,
)
