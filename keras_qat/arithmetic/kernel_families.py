"""Kernel families: the rounding of each runtime. Only this file compares names of families."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import tensorflow as tf

from keras_qat.messages import warn_caller

Rescaling = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""A function that multiplies integers (stored in float32) by a float32 factor, and rounds."""


def half_to_even(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Multiplies in float32 and rounds halves to even: XNNPACK on x86."""
    return tf.round(x * factor)


def half_up(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Multiplies exactly, in integers, and rounds halves up: XNNPACK on 64-bit ARM."""
    exact = tf.cast(x, tf.float64) * tf.cast(factor, tf.float64)
    return tf.cast(tf.floor(exact + 0.5), x.dtype)


@dataclasses.dataclass(frozen=True)
class KernelFamily:
    """The rounding of one runtime's kernels. Operators read the fields.

    The defaults describe TFLite's portable kernels, which multiply by 31-bit fixed-point values and
    round twice. To add a family, add an object to `FAMILIES`.

    Args:
        name: the name that users pass as `kernels=`.
        sums: function that rescales int8 sums of products with weights. None means fixed point.
        matrix_products: function that rescales int8 sums of products of two tensors. None means
            fixed point.
        products: function that rescales int8 products of two tensors. None means fixed point.
        additions: how int8 sums and differences of two tensors are rounded. "rounded_twice" also
            rounds when the inputs are converted to a common scale.
        means: how an int8 mean multiplies the sum: in float32, in float32 with a fused addition of
            the offset, or in fixed point.
        quantize: how float values are converted to int8. "times_inverse" multiplies by the inverse
            scale and rounds halves to even. "divided" divides and rounds halves away from zero.
        requantize: how int8 values are rescaled, in 256ths or in fixed point.
        leaky_relu: format of the slopes of an int8 LeakyReLU, 256ths or fixed point.
        tables: how the int8 tables of ELU, sigmoid, tanh and squares are rounded.
        bilinear: precision of the pixel weights in int8 bilinear interpolation.
        optimized: True if TFLite's optimized kernels compute the operators that no other field
            describes. Some optimized kernels round halves up.
        neon: True if optimized kernels use ARM's vector instructions. These instructions round only
            once in sums with packed int4 weights, and in int8 hard swish for groups of 8 values.
        softmax: how int8 softmax computes exponentials: in float32, in fixed point, or with a
            uint16 table.
        int16_curves: how int16 sigmoid and tanh are computed. "table" interpolates in a table.
            "gates" approximates like LSTM gates if the scale is a power of two.
        dense: how int8 FULLY_CONNECTED multiplies sums if `sums` is None, in double precision or in
            fixed point.
        ratios: precision of ratios of scales before the conversion to fixed point.
        int16_softmax_tables: precision of the tables of int16 softmax.
        int8_curves: how int8 sigmoid and tanh are computed, in float32 or in fixed point. In fixed
            point, inputs beyond 15 return the end of the range.
        lstm: how the steps of an LSTM are rounded, as in TFLite or as in TFLite Micro.
        int16_lstm: True if there is an LSTM for int16 activations.
        int4_dense_per_channel: True if FULLY_CONNECTED supports int4 weights with one scale per
            channel.
        static_shapes: True if shapes must be constants in files with a fixed batch size.
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
"""TFLite's portable kernels."""

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
"""The default family."""

XNNPACK_ARM64 = dataclasses.replace(
    XNNPACK,
    name="xnnpack_arm64",
    products=half_up,
    means="fused",
    neon=True,
    softmax="uint16_table",
)
"""XNNPACK on 64-bit ARM (phones). Softmax and the rounding of halves differ from x86."""

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
"""All families by name."""

REMOVED = dict.fromkeys(("openvino", "onnxruntime", "esp_dl"), XNNPACK)
"""Replacements of removed families, by the name of the removed family."""


def kernel_family(kernels: str) -> KernelFamily:
    """Returns the family with this name.

    Raises:
        ValueError: if there is no family with this name.
    """
    if kernels in REMOVED:
        raise ValueError(f"kernels={kernels!r} was removed: use {REMOVED[kernels].name!r}.")
    if kernels not in FAMILIES:
        raise ValueError(f"kernels={kernels!r}: use one of {', '.join(map(repr, FAMILIES))}.")
    return FAMILIES[kernels]


def find_saved_family(kernels: str, model_name: str) -> KernelFamily:
    """Returns a saved model's family. For a removed family, warns and returns the replacement."""
    if kernels not in REMOVED:
        return kernel_family(kernels)
    family = REMOVED[kernels]
    warn_caller(
        f"'{model_name}' was saved with kernels={kernels!r}, which was removed. Its inference "
        f"rounds as {family.name!r} now, which changes some values by one step."
    )
    return family
