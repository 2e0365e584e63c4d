"""The largest value, or the mean, of windows or of whole axes, and where that is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.as_written import product, quotient
from keras_qat.arithmetic.fixed_point import exponent_of, fixed_point, multiply, shift
from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import layers
from keras_qat.frontend.tf_operations import operands
from keras_qat.ops import openvino
from keras_qat.ops.emission import Emission
from keras_qat.ops.image_shapes import add_on_images, pair
from keras_qat.ops.movement import axes_of, move, rank_of, symbol_of, window
from keras_qat.ops.op import Arguments, Attributes, Emit, Op, OwnRange, SharedRange
from keras_qat.ops.weighted_sums import EXACT
from keras_qat.tflite.schema import TYPES

PADDINGS = {"SAME": 0, "VALID": 1}
"""Padding -> its number in a file."""


def _pool_attributes(call: Call) -> Attributes:
    """Returns `pool` and `strides` along the axes between batch and channels, and `padding`."""
    layer, axes = call.layer, rank_of(call) - 2
    if not symbol_of(call):
        pool, strides, padding = layer.pool_size, layer.strides, layer.padding
        last = layer.data_format == "channels_last"
    else:
        names = ("input", "ksize", "strides", "padding", "data_format")
        _, pool, strides, padding, data_format = operands(call, *names)
        last = data_format is None or data_format.endswith("C")
    return {
        "pool": window(pool, axes),
        "strides": window(strides, axes),
        "padding": padding.upper() if isinstance(padding, str) else "EXPLICIT",
        "channels_last": last,
    }


def _accepts_pool(call: Call, attributes: Attributes) -> str | None:
    if len(attributes["pool"]) not in (1, 2):
        return "not of sequences or images"
    if not attributes["channels_last"]:
        return "data_format='channels_first'"
    return None if attributes["padding"] in PADDINGS else "explicit paddings"


def _emit_pool(code: str) -> Emit:
    def emit(e: Emission) -> None:
        """Writes a pooling; sequences are images of the height 1."""
        (height, width), (down, right) = (pair(e.attributes[name]) for name in ("pool", "strides"))
        add_on_images(
            e,
            code,
            [e.source],
            padding=PADDINGS[e.attributes["padding"]],
            strideH=down,
            strideW=right,
            filterHeight=height,
            filterWidth=width,
        )

    return emit


MAX_POOLING = move(
    "max_pooling",
    "the largest value of windows",
    _emit_pool("MAX_POOL_2D"),
    layers=(layers.MaxPooling1D, layers.MaxPooling2D),
    symbols=("nn.max_pool", "nn.max_pool1d", "nn.max_pool2d", "compat.v1.nn.max_pool"),
    attributes=_pool_attributes,
    needs=("pool", "strides", "padding"),
    defaults={"channels_last": True},
    accepts=_accepts_pool,
    integers=("uint8",),
    takes_clip=True,
)


def _average(a: Arguments) -> Any:
    """Averages the quantized values themselves, rounding halves away from zero."""
    (x,), zero_point = a.q, a.numbers
    averages = a.on([tf.cast(x, tf.float64)]) + zero_point
    # Halves are off by far less than the distance to the next quotient of whole numbers.
    away = tf.sign(averages) * tf.floor(tf.abs(averages) + 0.5 + 1e-7)
    return tf.cast(away - zero_point, x.dtype)


AVERAGE_POOLING = dataclasses.replace(
    MAX_POOLING,
    name="average_pooling",
    prepare=lambda a: a.params[0].zero_point,
    compute=_average,
    emit=_emit_pool("AVERAGE_POOL_2D"),
    doc="the mean of windows",
    integers=(),
    output=SharedRange(rounds=True),
    layers=(layers.AveragePooling1D, layers.AveragePooling2D),
    symbols=("nn.avg_pool", "nn.avg_pool1d", "nn.avg_pool2d", "compat.v1.nn.avg_pool"),
)


def _reduce_attributes(call: Call) -> Attributes:
    """Returns the `axes`, and `keepdims`: whether they stay, with the size 1."""
    layer, rank = call.layer, rank_of(call)
    if not symbol_of(call):
        start = 2 if layer.data_format == "channels_first" else 1
        return {"axes": tuple(range(start, start + rank - 2)), "keepdims": bool(layer.keepdims)}
    _, axis, keepdims = operands(call, "input_tensor", "axis", "keepdims")
    return {"axes": axes_of(axis, rank), "keepdims": bool(keepdims)}


def _emit_reduce(code: str) -> Emit:
    def emit(e: Emission) -> None:
        axes = e.constant("axes", e.attributes["axes"])
        e.add(code, [e.source, axes], keepDims=e.attributes["keepdims"])

    return emit


REDUCE_MAX = move(
    "reduce_max",
    "the largest value along axes",
    _emit_reduce("REDUCE_MAX"),
    layers=tuple(getattr(layers, f"GlobalMaxPooling{n}D") for n in (1, 2, 3)),
    symbols=("math.reduce_max",),
    attributes=_reduce_attributes,
    needs=("axes", "keepdims"),
    accepts=lambda call, attributes: None if attributes["axes"] else "along no axis",
    integers=(),
)

REDUCE_MIN = dataclasses.replace(
    REDUCE_MAX,
    name="reduce_min",
    emit=_emit_reduce("REDUCE_MIN"),
    doc="the smallest value along axes",
    layers=(),
    symbols=("math.reduce_min",),
)


_TRUTH = QuantParams(np.float32(0.5), 0, 8)
"""Parameters of truth values as numbers of 8 bits. NOT_EQUAL takes scales below 1."""


def _of_truth_values(name: str, code: str, words: str) -> Op:
    """Makes the row of a reduction of truth values: the largest or smallest of them as numbers.

    TFLite Micro has no operator for truth values.
    """

    def emit(e: Emission) -> None:
        shape, reduced = e.shape(e.source), e.shape(e.outputs[0])
        numbers = e.temporary("numbers", shape, _TRUTH)
        e.cast(e.source, numbers)
        result = e.temporary("result", reduced, _TRUTH)
        axes = e.constant("axes", e.attributes["axes"])
        e.add(code, [numbers, axes], [result], keepDims=e.attributes["keepdims"])
        e.add("NOT_EQUAL", [result, e.constant("zero", np.int8(0), _TRUTH)])

    return dataclasses.replace(
        REDUCE_MAX,
        name=name,
        emit=emit,
        doc=f"whether {words} along axes are true",
        output=OwnRange(),
        layers=(),
        symbols=(f"math.{name}",),
        integers=("bool",),
        max_axes=4,
    )


REDUCE_ANY = _of_truth_values("reduce_any", "REDUCE_MAX", "some truth values")
REDUCE_ALL = _of_truth_values("reduce_all", "REDUCE_MIN", "all truth values")


def _prepare_mean(a: Arguments) -> tuple[Any, ...]:
    """Returns what sums are multiplied by; in XNNPACK without the count where it is not known."""
    (params,), output = a.params, a.output
    if _is_fixed_point(a):
        return fixed_point(params.scale / output.scale)
    if a.family.by_levels:
        return openvino.prepare_reals(a)
    count = _known_count(a)
    if a.family.means == "one_factor":
        scales = params.scale, output.scale
        return scales if count is None else (_one_factor(scales, count),)
    numbers = single(params.scale / output.scale), params.zero_point, output.zero_point
    return numbers if count is None else _factor_and_offset(a, numbers, count)


def _known_count(a: Arguments) -> int | None:
    """Returns the number of values that a mean averages; None if it is not known."""
    shape = a.q[0].shape
    sizes = [None] if shape.rank is None else [shape[axis] for axis in a.attributes["axes"]]
    return None if None in sizes else math.prod(sizes)  # type: ignore[arg-type]


def _factor_and_offset(a: Arguments, numbers: Any, count: Any) -> tuple[Any, ...]:
    """Returns XNNPACK's factor for sums, the zero points in a sum, and the offsets that it adds."""
    (ratio, zero, zero_point), of_all = numbers, tf.cast(count, tf.float64)
    factor, of_zeros = single(ratio * single(1.0 / of_all)), of_all * zero
    return factor, of_zeros, single(zero_point - _summand(a, of_zeros * factor)), zero_point


def _summand(a: Arguments, product: Any) -> Any:
    """Rounds a product before something is added, where that is not one instruction with it."""
    return product if a.family.means == "fused" else single(product)


def _one_factor(scales: tuple[Any, Any], count: Any) -> Any:
    """Returns onnxruntime's factor for sums."""
    before, after = scales
    return single(quotient(before, single(after * tf.cast(count, tf.float64))))


def _is_fixed_point(a: Arguments) -> bool:
    return a.family.means == "fixed_point" or a.wide


def _mean(a: Arguments) -> Any:
    """Computes means along axes.

    XNNPACK multiplies the sum, zero points included, by a factor in float32, and adds an offset; on
    ARM both are rounded once. TFLite divides a multiplier of 31 bits, shifted beforehand, by the
    number of values.
    """
    (x,), (params,) = a.q, a.params
    axes = [axis % x.shape.rank for axis in a.attributes["axes"]]
    sizes = [x.shape[axis] for axis in axes]
    most = math.prod(size or 2**24 for size in sizes) * 2**params.bits
    adding = x if most < EXACT else tf.cast(x, tf.float64)
    sums = tf.cast(tf.reduce_sum(adding, axes, a.attributes["keepdims"]), tf.float64)
    count: Any = tf.constant(_known_count(a) or 0, tf.int64)
    if None in sizes:
        count = tf.reduce_prod(tf.gather(tf.shape(x, tf.int64), axes))
    if _is_fixed_point(a):
        multiplier, exponent = a.numbers
        bits = tf.minimum(tf.minimum(exponent_of(tf.cast(count, tf.float64)), 32), 31 + exponent)
        factor = shift(multiplier, bits) // count, exponent - bits
        return tf.cast(multiply(tf.cast(sums, tf.int64), factor), x.dtype)
    numbers: Any = a.numbers
    if a.family.by_levels:
        return openvino.mean(sums, tf.cast(count, tf.float64), numbers)
    if a.family.means == "one_factor":
        (only,) = numbers if len(numbers) == 1 else (_one_factor(numbers, count),)
        return tf.cast(a.family.halves(single(product(sums, only))), x.dtype)
    if len(numbers) == 3:  # The count was not known.
        numbers = _factor_and_offset(a, numbers, count)
    factor, of_zeros, offset, zero_point = numbers
    scaled = tf.round(single(_summand(a, (sums + of_zeros) * factor) + offset))
    return tf.cast(scaled - zero_point, x.dtype)


def _accepts_mean(call: Call, attributes: Attributes) -> str | None:
    is_masked = not symbol_of(call) and any(value.masked for value in call.inputs)
    return REDUCE_MAX.accepts(call, attributes) or ("with a mask" if is_masked else None)


MEAN = dataclasses.replace(
    REDUCE_MAX,
    name="mean",
    prepare=_prepare_mean,
    compute=_mean,
    emit=_emit_reduce("MEAN"),
    doc="means along axes",
    output=OwnRange(),
    falls_back_to_input_range=True,
    onnx_kernel=True,
    layers=tuple(getattr(layers, f"GlobalAveragePooling{n}D") for n in (1, 2, 3)),
    symbols=("math.reduce_mean",),
    accepts=_accepts_mean,
)


def _arg_attributes(call: Call) -> Attributes:
    _, axis = operands(call, "input", "axis")
    axis = call.kwargs.get("dimension", axis)
    axes = axes_of(axis or 0, rank_of(call))
    return {"axis": axes[0] if axes else None}


def _emit_arg(code: str) -> Emit:
    def emit(e: Emission) -> None:
        source = e.source
        if e.wide:  # The kernels take int8 and int32.
            wider = e.temporary("int32", e.shape(source), "int32")
            e.cast(source, wider)
            source = wider
        axis = e.constant("axis", e.attributes["axis"])
        e.add(code, [source, axis], outputType=TYPES[e.node.output.dtype])

    return emit


ARGMAX = move(
    "argmax",
    "where the largest value is",
    _emit_arg("ARG_MAX"),
    compute=lambda a: a.on(a.q),
    output=OwnRange(),
    symbols=("math.argmax",),
    attributes=_arg_attributes,
    needs=("axis",),
    integers=(),
)

ARGMIN = dataclasses.replace(
    ARGMAX,
    name="argmin",
    emit=_emit_arg("ARG_MIN"),
    doc="where the smallest value is",
    symbols=("math.argmin",),
)
