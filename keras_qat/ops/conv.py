"""Convolutions: CONV_2D and DEPTHWISE_CONV_2D, along one axis or two."""

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
from keras_qat.ops.sums import weight_constants, weighted
from keras_qat.tflite.emission import Emission

__all__ = ["CONV", "DEPTHWISE_CONV", "convolved", "convolved_by_channel"]

_layers = keras.layers

DEFAULTS: Attributes = {
    "strides": 1,
    "padding": "valid",
    "dilation": 1,
    "data_format": "channels_last",
}


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
    return None if rank in (3, 4) else f"{rank - 2} spatial axes"


def _left(a: Attributes, steps: int) -> int:
    """What causal padding adds in front of a sequence, for a kernel of so many steps."""
    return (steps - 1) * pair(a["dilation"])[1] if a["padding"] == "causal" else 0


def _padding(a: Attributes) -> str:
    return "SAME" if a["padding"] == "same" else "VALID"


def _on_images(function: Any, a: Attributes, x: Any, kernel: Any) -> Any:
    """A function of attributes, images and a kernel, on images or sequences."""
    if x.shape.rank == 4:
        return function(a, x, kernel)
    return tf.squeeze(function(a, tf.expand_dims(x, 1), tf.expand_dims(kernel, 0)), 1)


def convolved(a: Attributes, x: Any, kernel: Any) -> Any:
    """A convolution of numbers: one with the attributes of CONV."""
    return _on_images(_convolved, a, x, kernel)


def _convolved(a: Attributes, x: Any, kernel: Any) -> Any:
    padding: Any = _padding(a)
    if left := _left(a, kernel.shape[1]):
        padding = [[0, 0], [0, 0], [left, 0], [0, 0]]
    return tf.nn.conv2d(x, kernel, pair(a["strides"]), padding, dilations=pair(a["dilation"]))


def convolved_by_channel(a: Attributes, x: Any, kernel: Any) -> Any:
    """A convolution of numbers: one with the attributes of DEPTHWISE_CONV."""
    if x.shape.rank == 3:  # TensorFlow wants equal strides; there is nothing along the first axis.
        a = {**a, "strides": pair(a["strides"])[1]}
    return _on_images(_convolved_by_channel, a, x, kernel)


def _convolved_by_channel(a: Attributes, x: Any, kernel: Any) -> Any:
    strides = [1, *pair(a["strides"]), 1]
    return tf.nn.depthwise_conv2d(x, kernel, strides, _padding(a), dilations=pair(a["dilation"]))


def _conv(a: Arguments) -> Any:
    return weighted(a, partial(convolved, a.attributes), (-1,))


def _depthwise(a: Arguments) -> Any:
    return weighted(a, partial(convolved_by_channel, a.attributes), (-2, -1))


def _options(e: Emission) -> dict[str, Any]:
    a = e.attributes
    strides, dilation = pair(a["strides"]), pair(a["dilation"])
    if len(e.shape(e.inputs[0])) == 3:
        strides, dilation = (1, strides[1]), (1, dilation[1])
    return {
        "padding": getattr(schema.Padding, _padding(a)),
        "strideH": strides[0],
        "strideW": strides[1],
        "dilationHFactor": dilation[0],
        "dilationWFactor": dilation[1],
        "fusedActivationFunction": e.activation,
    }


def _emit_conv(e: Emission) -> None:
    def arrange(q: np.ndarray) -> np.ndarray:
        return (q[None] if q.ndim == 3 else q).transpose(3, 0, 1, 2)

    x = image_of(e, e.inputs[0])
    steps = e.node.weights.q.shape[0]  # type: ignore[union-attr]
    if left := _left(e.attributes, steps):
        batch, height, width, channels = e.shape(x)
        width = None if width is None else width + left
        padded = e.temporary("padded", (batch, height, width, channels), x)
        pads = np.array([[0, 0], [0, 0], [left, 0], [0, 0]], np.int32)
        e.add("PAD", [x, e.constant("pads", pads)], [padded], "PadOptions")
        x = padded
    end, finish = from_image(e, e.outputs[0])
    e.add("CONV_2D", [x, *weight_constants(e, arrange, 0)], [end], "Conv2DOptions", **_options(e))
    finish()


def _emit_depthwise(e: Emission) -> None:
    def arrange(q: np.ndarray) -> np.ndarray:
        return q.reshape(1, *(1,) * (4 - q.ndim), *q.shape[:-2], -1)

    multiplier = int(e.node.weights.q.shape[-1])  # type: ignore[union-attr]
    x = image_of(e, e.inputs[0])
    end, finish = from_image(e, e.outputs[0])
    e.add(
        "DEPTHWISE_CONV_2D",
        [x, *weight_constants(e, arrange, 3)],
        [end],
        "DepthwiseConv2DOptions",
        depthMultiplier=multiplier,
        **_options(e),
    )
    finish()


CONV = Op(
    "conv",
    _conv,
    _emit_conv,
    doc="convolutions along one axis or two, with groups, strides and dilation",
    layers=(_layers.Conv1D, _layers.Conv2D),
    attributes=_attributes,
    defaults=DEFAULTS,
    accepts=_accepts,
    weights={"kernel": (-1,)},
    folds_batch_norm=True,
    takes_clip=True,
)

DEPTHWISE_CONV = Op(
    "depthwise_conv",
    _depthwise,
    _emit_depthwise,
    doc="convolutions of each channel by itself",
    layers=(_layers.DepthwiseConv1D, _layers.DepthwiseConv2D),
    attributes=_attributes,
    defaults=DEFAULTS,
    accepts=_accepts,
    weights={"depthwise_kernel": (-2, -1)},
    folds_batch_norm=True,
    takes_clip=True,
)
