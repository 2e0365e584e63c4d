"""Coral's Edge TPU, as its compiler's documentation describes it."""

from __future__ import annotations

import dataclasses

from keras_qat.config.targets.target import Kernel, Target, operators
from keras_qat.tflite.reader import Site

_KERNEL = Kernel(("int8", "uint8", "int32"))


def _at_most_three_axes(site: Site) -> str | None:
    computed = [tensor for tensor in site.tensors if site.graph.constant(tensor.index) is None]
    counts = [sum(size != 1 for size in tensor.shape) for tensor in computed]
    return None if max(counts) <= 3 else f"at most 3 axes longer than 1, not {max(counts)}"


def _constant_padding(site: Site) -> str | None:
    return None if site.constant(1) is not None else "constant sizes only"


EDGETPU = Target(
    name="edgetpu",
    title="the Edge TPU",
    kernels="reference",
    batch_size=1,
    bits=(8,),
    has_float=False,
    elsewhere="the CPU, with all that comes behind them",
    checks=(_at_most_three_axes,),
    operators=operators(
        ("ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D EXPAND_DIMS", _KERNEL),
        ("FULLY_CONNECTED L2_NORMALIZATION LOGISTIC MAXIMUM MAX_POOL_2D MEAN MINIMUM", _KERNEL),
        ("MUL PACK PRELU QUANTIZE REDUCE_MAX REDUCE_MIN RELU RELU6 RESHAPE", _KERNEL),
        ("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR RSQRT SLICE SOFTMAX SPACE_TO_DEPTH", _KERNEL),
        ("SPLIT SQUEEZE STRIDED_SLICE SUB SUM SQUARED_DIFFERENCE TANH TRANSPOSE", _KERNEL),
        ("TRANSPOSE_CONV UNIDIRECTIONAL_SEQUENCE_LSTM", _KERNEL),
        ("PAD", dataclasses.replace(_KERNEL, checks=(_constant_padding,))),
    ),
    source="read: the compiler's page of operations; its rounding is not published: none is proven",
)
