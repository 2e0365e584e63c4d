"""Vectors of length 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.fixed_point import inverse_square_root, multiply
from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call
from keras_qat.operations import is_operation, number, operands
from keras_qat.ops.lookup import of_reals
from keras_qat.ops.op import Arguments, Attributes, FixedRange, Op
from keras_qat.tflite.emission import Emission

__all__ = ["UNIT_NORM"]

LARGEST_EPSILON = 1e-5
"""Kernels have none. Larger ones would show in results."""


def _unit_norm(a: Arguments) -> Any:
    """Along the last axis, in 128ths; XNNPACK leaves it to TFLite. The input's scale is lost."""
    x = tf.cast(a.q[0], tf.int64)
    multiplier, exponent = inverse_square_root(tf.reduce_sum(x * x, -1, keepdims=True))
    return tf.cast(multiply(x, (multiplier, exponent + 7)), a.q[0].dtype)


def _emit(e: Emission) -> None:
    e.add("L2_NORMALIZATION", options="L2NormOptions")


def _attributes(call: Call) -> Attributes:
    axis, epsilon = getattr(call.layer, "axis", None), None
    if is_operation(call.layer):
        _, axis, epsilon = operands(call, "x", "axis", "epsilon")
    rank = len(call.output.shape)
    axes = tuple(int(each) % rank - rank for each in tf.nest.flatten([axis]) if each is not None)
    return {"axes": axes, "epsilon": number(epsilon) or 0.0}


def _accepts(call: Call, attributes: Attributes) -> str | None:
    rank = len(call.output.shape)
    if attributes["axes"] != (-1,) or rank < 2:
        return "not along the last axis"
    if attributes["epsilon"] > LARGEST_EPSILON:
        return f"epsilon above {LARGEST_EPSILON:g}"
    if rank > 4:
        return "more than 4 axes"
    return of_reals(call)


UNIT_NORM = Op(
    "unit_norm",
    _unit_norm,
    _emit,
    doc="vectors along the last axis, scaled to the length 1",
    layers=(keras.layers.UnitNormalization,),
    symbols=("math.l2_normalize",),
    attributes=_attributes,
    defaults={"axes": (-1,), "epsilon": 0.0},
    accepts=_accepts,
    bits=(8,),
    output=FixedRange(-1.0, 127 / 128),
)
