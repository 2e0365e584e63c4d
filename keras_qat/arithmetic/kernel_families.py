"""Kernel families: how the kernels of each runtime round. The one place that knows their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from keras_qat.messages import warn_caller

Rescaling = Callable[[Any, Any], Any]
"""Multiplies whole numbers, given in float32, by a float32 factor and rounds the result."""


def half_to_even(numbers: Any, factor: Any) -> Any:
    """Multiplies in float32 and rounds halves to even numbers: XNNPACK on x86."""
    return tf.round(numbers * factor)


def half_up(numbers: Any, factor: Any) -> Any:
    """Multiplies in integers, so exactly, and rounds halves up: XNNPACK on 64-bit ARM."""
    exact = tf.cast(numbers, tf.float64) * tf.cast(factor, tf.float64)
    return tf.cast(tf.floor(exact + 0.5), numbers.dtype)


def halves_up(x: Any) -> Any:
    """Rounds to whole numbers, halves up."""
    return tf.floor(x + 0.5)


@dataclasses.dataclass(frozen=True)
class KernelFamily:
    """The rounding of one runtime: a field for each question that operators ask about it.

    The defaults are the portable kernels of TFLite. They multiply by 31-bit fixed-point numbers
    and round twice. A new family is one more object in `FAMILIES`; operators never ask for a
    family's name.

    Args:
        name: what users pass as `kernels=`.
        sums: rescales int8 sums of products with weights; None: in fixed point.
        matrix_products: rescales int8 sums of products of two tensors; None: in fixed point.
        products: rescales int8 products of two tensors; None: in fixed point.
        additions: whether int8 sums and differences of two tensors are rounded once, at the end,
            or twice, first on the way to a common scale, or computed in float32.
        means: whether int8 sums over axes are divided by their count in float32, so too but with
            offsets added before anything is rounded, in fixed point, or times one float32 factor.
        quantize: whether real numbers are multiplied by the inverse of the int8 scale, halves to
            even, or divided by the scale, halves away from zero, or as `halves` rounds.
        requantize: whether int8 values get another scale by a factor in 256ths, in fixed point, or
            as real numbers.
        leaky_relu: whether an int8 LeakyReLU multiplies by slopes in 256ths or in fixed point.
        tables: how the int8 tables of ELU, sigmoid, tanh and squares round.
        bilinear: precision of the weights of pixels in int8 bilinear interpolation.
        optimized: whether TFLite's optimized kernels compute what the fields above leave to
            TFLite. Some of them round halves up.
        neon: whether these optimized kernels are those in ARM's vector instructions. They round
            int8 hard swish of 8 values at a time, and sums with packed int4 weights, only once.
        softmax: whether int8 softmax computes exponentials in float32, in fixed point, or looks
            them up in a table of uint16 and adds them up in integers, or in one of float32.
        int16_curves: whether int16 sigmoid and tanh of scales that are powers of two use the
            approximations of LSTM gates, or interpolate in a table.
        dense: whether int8 FULLY_CONNECTED multiplies its sums in double precision, where `sums`
            is None, or in fixed point.
        ratios: precision in which ratios of scales are computed before they become fixed point.
        int16_softmax_tables: precision in which the tables of int16 softmax are computed.
        int8_curves: whether int8 sigmoid and tanh are tables of float32, or computed in fixed point
            for inputs up to 15, beyond which they are at the end of their range.
        lstm: whether the steps of an LSTM round as TFLite or as TFLite Micro.
        int16_lstm: whether there is an LSTM for int16 activations.
        int4_dense_per_channel: whether FULLY_CONNECTED takes int4 weights with a scale for each
            channel.
        static_shapes: whether the runtime wants shapes as constants where a batch size is given.
        in_float: whether operators that the fields above do not describe compute in float32, from
            real numbers, and their results are divided by the scale.
        halves: rounds what the kernels of `in_float` computed in float32: halves to even or up.
    """

    name: str
    sums: Rescaling | None = None
    matrix_products: Rescaling | None = None
    products: Rescaling | None = None
    additions: Literal["rounded_once", "rounded_twice", "float32"] = "rounded_twice"
    means: Literal["float32", "fused", "fixed_point", "one_factor"] = "fixed_point"
    quantize: Literal["times_inverse", "divided", "divided_by_float32"] = "divided"
    requantize: Literal["256ths", "fixed_point", "float32"] = "fixed_point"
    leaky_relu: Literal["256ths", "fixed_point"] = "fixed_point"
    tables: Literal["half_to_even", "half_away"] = "half_away"
    bilinear: Literal["2048ths", "1024ths"] = "1024ths"
    optimized: bool = False
    neon: bool = False
    softmax: Literal["float32", "fixed_point", "uint16_table", "float32_table"] = "fixed_point"
    int16_curves: Literal["gates", "table"] = "table"
    dense: Literal["double", "fixed_point"] = "double"
    ratios: Literal["float32", "float64"] = "float32"
    int16_softmax_tables: Literal["float32", "float64"] = "float64"
    int8_curves: Literal["float32", "fixed_point"] = "float32"
    lstm: Literal["tflite", "tflite_micro"] = "tflite"
    int16_lstm: bool = False
    int4_dense_per_channel: bool = True
    static_shapes: bool = False
    in_float: bool = False
    halves: Callable[[Any], Any] = tf.round


REFERENCE = KernelFamily("reference")
"""The portable kernels of TFLite."""

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
"""XNNPACK on x86, and TFLite's optimized kernels for operators that XNNPACK lacks: desktops."""

DEFAULT = XNNPACK
"""The family of models, and of files of other programs, for which none was chosen."""

XNNPACK_ARM64 = dataclasses.replace(
    XNNPACK,
    name="xnnpack_arm64",
    products=half_up,
    means="fused",
    neon=True,
    softmax="uint16_table",
)
"""The same on 64-bit ARM: phones. It differs in softmax, and where results lie on halves."""

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
"""TFLite Micro. Its kernels began as TFLite's portable ones and differ in some points."""

ONNXRUNTIME = KernelFamily(
    "onnxruntime",
    sums=half_to_even,
    matrix_products=half_to_even,
    products=half_to_even,
    additions="float32",
    means="one_factor",
    quantize="divided_by_float32",
    requantize="float32",
    softmax="float32_table",
    in_float=True,
)
"""onnxruntime's CPU kernels on x86, for files of `export_onnx`."""

ESP_DL = dataclasses.replace(
    ONNXRUNTIME,
    name="esp_dl",
    sums=half_up,
    matrix_products=half_up,
    halves=halves_up,
)
"""ESP-DL on ESP32 and ESP32-S3, for `recipes.power_of_two`. On ESP32-P4 it is as onnxruntime."""

FAMILIES = {
    family.name: family for family in (XNNPACK, XNNPACK_ARM64, REFERENCE, TFLM, ONNXRUNTIME, ESP_DL)
}
"""All families, by the name that users pass as `kernels=`."""

REMOVED = {"openvino": ONNXRUNTIME}
"""Name of a family of earlier releases -> the family to use instead."""


def kernel_family(kernels: str) -> KernelFamily:
    """Returns the family with this name.

    Raises:
        ValueError: if there is no such family.
    """
    if kernels in REMOVED:
        raise ValueError(f"kernels={kernels!r} was removed: use {REMOVED[kernels].name!r}.")
    if kernels not in FAMILIES:
        raise ValueError(f"kernels={kernels!r}: use one of {', '.join(map(repr, FAMILIES))}.")
    return FAMILIES[kernels]


def find_saved_family(kernels: str, model_name: str) -> KernelFamily:
    """Returns the family of a saved model, or a successor with a warning if it was removed."""
    if kernels not in REMOVED:
        return kernel_family(kernels)
    family = REMOVED[kernels]
    warn_caller(
        f"'{model_name}' was saved with kernels={kernels!r}, which was removed. Its inference "
        f"rounds as {family.name!r} now, which changes single values by one step."
    )
    return family
