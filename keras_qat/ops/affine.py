"""temporary"""

from __future__ import annotations
from typing import Any
import numpy as np, tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema
from keras_qat.keras2.backend import keras
from keras_qat.ops.op import Arguments, Op
from keras_qat.ops.sums import weight_constants, weighted
from keras_qat.tflite.emission import Emission

L = keras.layers


def _accepts(call, a):
    axis = getattr(call.layer, "axis", -1)
    rank = len(call.output.shape)
    axes = list(axis) if isinstance(axis, (list, tuple)) else [axis]
    return (
        None
        if rank > 1 and [x % rank for x in axes] in ([rank - 1], [])
        else "not one factor per channel"
    )


def _compute(a):
    return weighted(a, lambda x, k: x * k, (-1,))


def _emit(e):
    x, y = e.inputs[0], e.outputs[0]
    shape = e.shape(x)
    c = shape[-1]
    src, dst = x, y
    if len(shape) != 4:
        src = e.temporary("image", (None, 1, 1, c), x)
        dst = e.temporary("scaled", (None, 1, 1, c), y)
        e.reshape(x, src)
    e.add(
        "DEPTHWISE_CONV_2D",
        [src, *weight_constants(e, lambda q: q.reshape(1, 1, 1, -1), 3, False)],
        [dst],
        "DepthwiseConv2DOptions",
        padding=1,
        strideH=1,
        strideW=1,
        depthMultiplier=1,
        dilationHFactor=1,
        dilationWFactor=1,
        fusedActivationFunction=e.activation,
    )
    if dst != y:
        e.reshape(dst, y)


AFFINE = Op(
    "affine",
    _compute,
    _emit,
    layers=(L.BatchNormalization, L.Rescaling, L.Normalization),
    paths=("applications.convnext.LayerScale",),
    accepts=_accepts,
    weights={"": (-1,)},
    takes_clip=True,
)
