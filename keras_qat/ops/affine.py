"""Operator with a scale and an offset for each channel: a DEPTHWISE_CONV_2D of one pixel."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import keras
from keras_qat.ops.emission import Emission
from keras_qat.ops.image_shapes import ONE_PIXEL, add_on_images
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.weighted_sums import Sums, prepare_sums, weight_constants, weighted

__all__ = ["AFFINE"]

_layers = keras.layers


def _attributes(call: Call) -> Attributes:
    """Returns `axes` along which scales and offsets differ; none if they are the same."""
    rank, axes = len(call.output.shape), tf.nest.flatten([getattr(call.layer, "axis", -1)])
    return {"axes": tuple(int(axis) % rank for axis in axes if axis is not None)}


def _accepts(call: Call, attributes: Attributes) -> str | None:
    last = len(call.output.shape) - 1
    known = attributes["axes"] in ((), (last,))
    return None if last > 0 and known else "not one factor per channel"


def _prepare(a: Arguments) -> Sums:
    return prepare_sums(a, (-1,))


def _compute(a: Arguments) -> Any:
    return weighted(a, lambda x, factors: x * factors, (-1,))


def _emit(e: Emission) -> None:
    weights = weight_constants(e, lambda q: q.reshape(1, 1, 1, -1), 3)
    inputs = [e.inputs[0], *weights]
    add_on_images(e, "DEPTHWISE_CONV_2D", inputs, depthMultiplier=1, **ONE_PIXEL)


AFFINE = Op(
    "affine",
    _compute,
    _emit,
    prepare=_prepare,
    doc="one factor and offset for each channel: BatchNormalization that is not folded",
    layers=(_layers.BatchNormalization, _layers.Rescaling, _layers.Normalization),
    paths=("applications.convnext.LayerScale",),
    attributes=_attributes,
    defaults={"axes": (-1,)},
    accepts=_accepts,
    integers=(),
    weights={"": (-1,)},
    takes_clip=True,
)
