"""Pooling, and reductions such as maximum, any, argmax and top k along axes."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import Call
from keras_qat.graph.operations import get_argument, get_kind, get_operands
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission, as_pair, emit_on_images
from keras_qat.ops.movement import get_rank, make_movement, read_axes, read_integer, read_window
from keras_qat.ops.op import Arguments, Attributes, Op, OwnRange, SharedRange
from keras_qat.tflite.schema import TYPES

PADDINGS = {"SAME": 0, "VALID": 1}
"""Maps the padding of Keras to `Padding` in TFLite's schema."""


def _pool_attributes(call: Call) -> Attributes:
    layer, axes = call.layer, get_rank(call) - 2
    if not get_kind(call):
        pool, strides, padding = layer.pool_size, layer.strides, layer.padding
        last = layer.data_format == "channels_last"
    else:
        names = ("ksize", "strides", "padding", "data_format")
        pool, strides, padding, data_format = get_operands(call, *names)
        last = data_format is None or data_format.endswith("C")
    return {
        "pool": read_window(pool, axes),
        "strides": read_window(strides, axes),
        "padding": padding.upper() if isinstance(padding, str) else "EXPLICIT",
        "channels_last": last,
    }


def _accepts_pool(call: Call, attributes: Attributes) -> str | None:
    if len(attributes["pool"]) not in (1, 2):
        return "not a sequence or an image"
    if not attributes["channels_last"]:
        return "data_format='channels_first'"
    return None if attributes["padding"] in PADDINGS else "explicit paddings"


def _emit_pool(code: str, e: Emission) -> None:
    # A sequence becomes an image of height 1.
    (height, width), (down, right) = (as_pair(e.attributes[name]) for name in ("pool", "strides"))
    emit_on_images(
        e,
        code,
        [e.source],
        padding=PADDINGS[e.attributes["padding"]],
        strideH=down,
        strideW=right,
        filterHeight=height,
        filterWidth=width,
    )


MAX_POOLING = make_movement(
    "max_pooling",
    "the maximum of each window",
    partial(_emit_pool, "MAX_POOL_2D"),
    layers=(layers.MaxPooling1D, layers.MaxPooling2D),
    kinds=("max_pool",),
    attributes=_pool_attributes,
    needs=("pool", "strides", "padding"),
    defaults={"channels_last": True},
    accepts=_accepts_pool,
    integers=("uint8",),
    can_merge_relu=True,
)


def _average(a: Arguments) -> tf.Tensor:
    """Average the quantized values, rounding halves away from zero."""
    (x,), zero_point = a.q, a.prepared
    averages = a.run_layer([tf.cast(x, tf.float64)]) + zero_point
    # 1e-7 exceeds the rounding error of a half, but not the distance to the next quotient.
    away = tf.sign(averages) * tf.floor(tf.abs(averages) + 0.5 + 1e-7)
    return tf.cast(away - zero_point, x.dtype)


AVERAGE_POOLING = dataclasses.replace(
    MAX_POOLING,
    name="average_pooling",
    prepare=lambda a: a.params[0].zero_point,
    compute=_average,
    emit=partial(_emit_pool, "AVERAGE_POOL_2D"),
    doc="the mean of each window",
    integers=(),
    output=SharedRange(rounds=True),
    layers=(layers.AveragePooling1D, layers.AveragePooling2D),
    kinds=("avg_pool",),
)


def _reduce_attributes(call: Call) -> Attributes:
    layer, rank = call.layer, get_rank(call)
    if not get_kind(call):
        start = 2 if layer.data_format == "channels_first" else 1
        return {"axes": tuple(range(start, start + rank - 2)), "keepdims": bool(layer.keepdims)}
    axis, keepdims = get_operands(call, "axis", "keepdims")
    return {"axes": read_axes(axis, rank), "keepdims": bool(keepdims)}


def emit_reduce(code: str, e: Emission) -> None:
    axes = e.constant("axes", e.attributes["axes"])
    e.add(code, [e.source, axes], keepDims=e.attributes["keepdims"])


REDUCE_MAX = make_movement(
    "reduce_max",
    "the largest value along axes",
    partial(emit_reduce, "REDUCE_MAX"),
    layers=tuple(getattr(layers, f"GlobalMaxPooling{n}D") for n in (1, 2, 3)),
    kinds=("reduce_max",),
    attributes=_reduce_attributes,
    needs=("axes", "keepdims"),
    accepts=lambda call, attributes: None if attributes["axes"] else "its list of axes is empty",
    integers=(),
)

REDUCE_MIN = dataclasses.replace(
    REDUCE_MAX,
    name="reduce_min",
    emit=partial(emit_reduce, "REDUCE_MIN"),
    doc="the smallest value along axes",
    layers=(),
    kinds=("reduce_min",),
)


_TRUTH = QuantParams(np.float32(0.5), 0, 8)
"""Quantization parameters of booleans in int8. NOT_EQUAL requires a scale below 1."""


def _make_boolean_reduction(name: str, code: str, words: str) -> Op:
    """Return an `Op` that reduces booleans as int8, because TFLite Micro cannot reduce booleans."""

    def emit(e: Emission) -> None:
        shape, reduced = e.shape(e.source), e.shape(e.outputs[0])
        as_int8 = e.temporary("numbers", shape, _TRUTH)
        e.cast(e.source, as_int8)
        result = e.temporary("result", reduced, _TRUTH)
        axes = e.constant("axes", e.attributes["axes"])
        e.add(code, [as_int8, axes], [result], keepDims=e.attributes["keepdims"])
        e.add("NOT_EQUAL", [result, e.constant("zero", np.int8(0), _TRUTH)])

    return dataclasses.replace(
        REDUCE_MAX,
        name=name,
        emit=emit,
        doc=f"whether {words} along axes are true",
        output=OwnRange(),
        layers=(),
        kinds=(name,),
        integers=("bool",),
        max_axes=4,
    )


REDUCE_ANY = _make_boolean_reduction("reduce_any", "REDUCE_MAX", "any booleans")
REDUCE_ALL = _make_boolean_reduction("reduce_all", "REDUCE_MIN", "all booleans")


def _arg_attributes(call: Call) -> Attributes:
    axis = call.kwargs.get("dimension", get_argument(call, "axis"))
    axes = read_axes(axis or 0, get_rank(call))
    return {"axis": axes[0] if axes else None}


def _emit_arg(code: str, e: Emission) -> None:
    source = e.source
    if e.wide:  # The kernels support int8 and int32.
        wider = e.temporary("int32", e.shape(source), "int32")
        e.cast(source, wider)
        source = wider
    axis = e.constant("axis", e.attributes["axis"])
    e.add(code, [source, axis], outputType=TYPES[e.node.output.dtype])


ARGMAX = make_movement(
    "argmax",
    "the index of the largest value along an axis",
    partial(_emit_arg, "ARG_MAX"),
    compute=lambda a: a.run_layer(a.q),
    output=OwnRange(),
    kinds=("argmax",),
    attributes=_arg_attributes,
    needs=("axis",),
    integers=(),
)

ARGMIN = dataclasses.replace(
    ARGMAX,
    name="argmin",
    emit=partial(_emit_arg, "ARG_MIN"),
    doc="the index of the smallest value along an axis",
    kinds=("argmin",),
)


TOP_K = make_movement(
    "top_k",
    "the k largest values along the last axis in descending order, and their indices",
    lambda e: e.add("TOPK_V2", [e.source, e.constant("count", e.attributes["count"])]),
    # If values are equal, the lower index comes first, as in TFLite.
    compute=lambda a: tuple(tf.math.top_k(a.q[0], a.attributes["count"])),
    kinds=("top_k",),
    attributes=lambda call: {"count": read_integer(get_argument(call, "k"), 1)},
    needs=("count",),
    integers=(),
)
