"""Kernel families: how each runtime, such as XNNPACK or TFLite Micro, rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import tensorflow as tf

from keras_qat.messages import warn_caller

Rescaling = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""A function that multiplies integers (stored in float32) by a float32 factor, and rounds."""


def half_to_even(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Computes `x * factor` in float32, and rounds halves to even, as XNNPACK does on x86."""
    return tf.round(x * factor)


def half_up(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Computes `x * factor` exactly, and rounds halves up, as XNNPACK does on 64-bit ARM."""
    exact = tf.cast(x, tf.float64) * tf.cast(factor, tf.float64)
    return tf.cast(tf.floor(exact + 0.5), x.dtype)


@dataclasses.dataclass(frozen=True)
class KernelFamily:
    """How the kernels of one runtime round. The defaults describe TFLite's portable kernels.

    An int8 kernel computes a 32-bit result, and multiplies it by a factor to get the scale of the
    output. The fields `sums`, `matrix_products` and `products` are functions that multiply. None
    means fixed-point arithmetic.

    Args:
        name: the name that users pass as `kernels=`.
        sums: multiplication in int8 convolutions and dense layers.
        matrix_products: multiplication in int8 matrix products of two tensors.
        products: multiplication in int8 MUL.
        additions: how int8 ADD and SUB round. "rounded_twice" also rounds when the inputs are
            converted to a common scale.
        means: multiplication in int8 MEAN: in float32, in float32 with a fused addition of the zero
            point, or in fixed point.
        quantize: how float values are converted to int8. "times_inverse" multiplies by the inverse
            scale and rounds halves to even. "divided" divides and rounds halves away from zero.
        requantize: factor of QUANTIZE from int8 to int8: a multiple of 1/256, or fixed point.
        leaky_relu: slope of an int8 LEAKY_RELU: a multiple of 1/256, or fixed point.
        tables: how halves round in the lookup tables of int8 ELU, sigmoid, tanh and square.
        bilinear: precision of the weights of pixels in int8 RESIZE_BILINEAR.
        optimized: True if operators without a field use TFLite's optimized kernels instead of the
            portable ones. Some optimized kernels round halves up.
        neon: True if optimized kernels use ARM's vector instructions. These instructions round only
            once in sums with packed int4 weights, and in int8 hard swish for groups of 8 values.
        softmax: how int8 softmax computes exponentials: in float32, in fixed point, or with a
            uint16 table.
        int16_curves: how int16 sigmoid and tanh are computed. "table" interpolates in a table.
            "gates" does so too, except for scales of 2^-12 (and 2^-11 in tanh). For these, it
            uses gemmlowp's functions, as the gates of an LSTM do.
        dense: precision of the factor of int8 FULLY_CONNECTED if `sums` is None: double, or the
            same as in convolutions.
        ratios: precision of factors such as `input_scale * weight_scale / output_scale`.
        int16_softmax_tables: precision when the lookup tables of int16 softmax are computed.
        int8_curves: how int8 sigmoid and tanh are computed, in float32 or in fixed point. In fixed
            point, the result for inputs beyond ±15 is the lowest or highest quantized value.
        lstm: whether an LSTM rounds as in TFLite or as in TFLite Micro.
        int16_lstm: True if there is an LSTM for int16 activations.
        int4_dense_per_channel: True if FULLY_CONNECTED supports int4 weights with one scale per
            channel.
        static_shapes: True if shapes must be constants in files with a fixed batch size, because
            the runtime cannot compute shapes.
    """

    name: str
    sums: Rescaling | None = None
    matrix_products: Rescaling | None = None
    products: Rescaling | None = None
    additions: Literal["rounded_once", "rounded_twice"] = "rounded_twice"
    means: Literal["float32", "fused", "fixed_point"] = "fixed_point"
    quantize: Literal["times_inverse", "divided"] = "divided"
    requantize: Literal["256ths", "fixed_point"] = "fixed_point"
    leaky_relu: Literal["256ths", "fixed_point"] = "fixed_point"
    tables: Literal["half_to_even", "half_away"] = "half_away"
    bilinear: Literal["2048ths", "1024ths"] = "1024ths"
    optimized: bool = False
    neon: bool = False
    softmax: Literal["float32", "fixed_point", "uint16_table"] = "fixed_point"
    int16_curves: Literal["gates", "table"] = "table"
    dense: Literal["double", "fixed_point"] = "double"
    ratios: Literal["float32", "float64"] = "float32"
    int16_softmax_tables: Literal["float32", "float64"] = "float64"
    int8_curves: Literal["float32", "fixed_point"] = "float32"
    lstm: Literal["tflite", "tflite_micro"] = "tflite"
    int16_lstm: bool = False
    int4_dense_per_channel: bool = True
    static_shapes: bool = False


REFERENCE = KernelFamily("reference")

XNNPACK = KernelFamily(
    "xnnpack",
    sums=half_to_even,
    matrix_products=half_to_even,
    products=half_to_even,
    additions="rounded_once",
    means="float32",
    quantize="times_inverse",
    requantize="256ths",
    leaky_relu="256ths",
    tables="half_to_even",
    bilinear="2048ths",
    optimized=True,
    softmax="float32",
    int16_curves="gates",
)
"""XNNPACK on x86, and TFLite's optimized kernels for operators that XNNPACK lacks."""

DEFAULT = XNNPACK

XNNPACK_ARM64 = dataclasses.replace(
    XNNPACK,
    name="xnnpack_arm64",
    products=half_up,
    means="fused",
    neon=True,
    softmax="uint16_table",
)

TFLM = KernelFamily(
    "tflm",
    dense="fixed_point",
    ratios="float64",
    int16_softmax_tables="float32",
    int8_curves="fixed_point",
    lstm="tflite_micro",
    int16_lstm=True,
    int4_dense_per_channel=False,
    static_shapes=True,
)
"""TFLite Micro. Most of the kernels round like TFLite's portable kernels."""

FAMILIES = {family.name: family for family in (XNNPACK, XNNPACK_ARM64, REFERENCE, TFLM)}

REMOVED = dict.fromkeys(("openvino", "onnxruntime", "esp_dl"), XNNPACK)
"""Names of families that earlier versions had, with the family that is used instead."""


def kernel_family(kernels: str) -> KernelFamily:
    """Returns the family that a user chose with `kernels=...`."""
    if kernels in REMOVED:
        raise ValueError(f"kernels={kernels!r} was removed: use {REMOVED[kernels].name!r}.")
    if kernels not in FAMILIES:
        raise ValueError(f"kernels={kernels!r}: use one of {', '.join(map(repr, FAMILIES))}.")
    return FAMILIES[kernels]


def find_saved_family(kernels: str, model_name: str) -> KernelFamily:
    """Returns the family of a saved model. If it was removed, warns and uses another family."""
    if kernels not in REMOVED:
        return kernel_family(kernels)
    family = REMOVED[kernels]
    warn_caller(
        f"'{model_name}' was saved with kernels={kernels!r}, which was removed. Its inference "
        f"rounds as {family.name!r} now, which changes some values by one step."
    )
    return family
