"""One factor and one offset for each channel: a DEPTHWISE_CONV_2D of one pixel."""

from __future__ import annotations

from typing import Any

from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call
from keras_qat.ops.images import from_image, image_of
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.sums import weight_constants, weighted
from keras_qat.tflite.emission import Emission

__all__ = ["AFFINE"]

_layers = keras.layers


def _attributes(call: Call) -> Attributes:
    """`axes`: those along which factors and offsets differ; none where they are the same."""
    rank = len(call.output.shape)
    axis = getattr(call.layer, "axis", -1)
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return {"axes": tuple(int(each) % rank for each in axes if each is not None)}


def _accepts(call: Call, attributes: Attributes) -> str | None:
    last = len(call.output.shape) - 1
    known = attributes["axes"] in ((), (last,))
    return None if last > 0 and known else "not one factor per channel"


def _compute(a: Arguments) -> Any:
    return weighted(a, lambda x, factors: x * factors, (-1,))


def _emit(e: Emission) -> None:
    image, finish = from_image(e, e.outputs[0])
    e.add(
        "DEPTHWISE_CONV_2D",
        [image_of(e, e.inputs[0]), *weight_constants(e, lambda q: q.reshape(1, 1, 1, -1), 3)],
        [image],
        "DepthwiseConv2DOptions",
        padding=schema.Padding.VALID,
        strideH=1,
        strideW=1,
        depthMultiplier=1,
        fusedActivationFunction=e.activation,
    )
    finish()


AFFINE = Op(
    "affine",
    _compute,
    _emit,
    doc="one factor and offset for each channel: BatchNormalization that is not folded",
    layers=(_layers.BatchNormalization, _layers.Rescaling, _layers.Normalization),
    paths=("applications.convnext.LayerScale",),
    attributes=_attributes,
    defaults={"axes": (-1,)},
    accepts=_accepts,
    weights={"": (-1,)},
    takes_clip=True,
)
