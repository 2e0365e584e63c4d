"""Sums, differences and products of two tensors, or of a tensor and a constant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.fixed_point import (
    exponent_of,
    fixed_point,
    multiply,
    power_of_two,
    shift,
    shift_back,
)
from keras_qat.arithmetic.qparams import single
from keras_qat.keras2.backend import keras
from keras_qat.ops.op import Arguments, Example, Op
from keras_qat.tflite.emission import Emission

__all__ = ["ADD", "SUBTRACT"]

_layers = keras.layers


def _add(a: Arguments) -> Any:
    """a + b, or a - b. XNNPACK: the larger ratio becomes a multiplier of 21 bits, half up once.

    It leaves ratios below 2^-10 and from 2^8 on to TFLite's kernel, which brings both numbers to a
    scale that holds either, with 20 more bits (15 for int16), and then to the output's.
    """
    x, y = (tf.cast(each, tf.int64) for each in a.q)
    y = y * a.attributes["sign"]
    scales, output = [each.scale for each in a.params], a.output.scale
    ratios = [single(each / output) for each in scales]

    def twice() -> Any:
        bits = 15 if a.wide else 20
        common = 2 * tf.maximum(*scales)
        first, second = (
            multiply(shift(each, bits), fixed_point(scale / common))
            for each, scale in ((x, scales[0]), (y, scales[1]))
        )
        return multiply(first + second, fixed_point(common / (2.0**bits * output)))

    def once() -> Any:
        bits = 20 - exponent_of(tf.maximum(*ratios))
        first, second = (tf.cast(tf.round(each * power_of_two(bits)), tf.int64) for each in ratios)
        half = shift(tf.ones_like(bits), bits - 1)
        return shift_back(x * first + y * second + half, bits)

    if a.family == "reference" or a.wide:
        return tf.cast(twice(), a.q[0].dtype)
    taken = tf.reduce_all([(each >= 2.0**-10) & (each < 2.0**8) for each in ratios])
    return tf.cast(tf.cond(taken, once, twice), a.q[0].dtype)


def _emit_add(e: Emission) -> None:
    code = "ADD" if e.attributes["sign"] > 0 else "SUB"
    e.add(
        code,
        options=f"{code.title()}Options",
        fusedActivationFunction=e.activation,
        potScaleInt16=False,
    )


def _example_of(layer: Any) -> Callable[[np.random.Generator], Example]:
    """Two tensors, now and then of different shapes."""

    def example(numbers: np.random.Generator) -> Example:
        small = (1, 1, 6) if numbers.random() < 0.3 else (4, 5, 6)
        return Example(lambda x, y: layer()([x, y]), ((4, 5, 6), small))

    return example


ADD = Op(
    "add",
    _add,
    _emit_add,
    doc="sums of two tensors, or of one and a constant",
    layers=(_layers.Add,),
    symbols=("__operators__.add", "math.add"),
    attributes=lambda call: {"sign": 1},
    takes_clip=True,
    elementwise=True,
    takes_constants=True,
    example=_example_of(_layers.Add),
)

SUBTRACT = dataclasses.replace(
    ADD,
    name="subtract",
    doc="differences of two tensors, or of one and a constant",
    layers=(_layers.Subtract,),
    symbols=("math.subtract",),
    attributes=lambda call: {"sign": -1},
    example=_example_of(_layers.Subtract),
)
