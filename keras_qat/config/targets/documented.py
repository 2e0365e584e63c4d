"""NPUs known only from documentation: the Edge TPU, MediaTek's and STMicroelectronics' NPUs."""

from __future__ import annotations

import dataclasses

from keras_qat.config.targets.target import Kernel, Target, operators
from keras_qat.tflite.reader import Site

_INTEGERS = Kernel(("int8", "uint8", "int32"))
_INTEGERS_AND_BOOL = Kernel((*_INTEGERS.types, "bool"))
_MOST_TYPES = Kernel(
    ("int4", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "bool")
)


def _check_axes(site: Site) -> str | None:
    computed = [tensor for tensor in site.tensors if site.graph.constant(tensor.index) is None]
    counts = [sum(size != 1 for size in tensor.shape) for tensor in computed]
    return None if max(counts) <= 3 else f"at most 3 axes longer than 1, not {max(counts)}"


def _check_padding(site: Site) -> str | None:
    return None if site.constant(1) is not None else "constant sizes only"


EDGETPU = Target(
    name="edgetpu",
    title="the Edge TPU",
    kernels="reference",
    batch_size=1,
    bits=(8,),
    has_float=False,
    elsewhere="the CPU, with all operators after them",
    checks=(_check_axes,),
    operators=operators(
        ("ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D EXPAND_DIMS", _INTEGERS),
        ("FULLY_CONNECTED L2_NORMALIZATION LOGISTIC MAXIMUM MAX_POOL_2D MEAN MINIMUM", _INTEGERS),
        ("MUL PACK PRELU QUANTIZE REDUCE_MAX REDUCE_MIN RELU RELU6 RESHAPE", _INTEGERS),
        ("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR RSQRT SLICE SOFTMAX SPACE_TO_DEPTH", _INTEGERS),
        ("SPLIT SQUEEZE STRIDED_SLICE SUB SUM SQUARED_DIFFERENCE TANH TRANSPOSE", _INTEGERS),
        ("TRANSPOSE_CONV UNIDIRECTIONAL_SEQUENCE_LSTM", _INTEGERS),
        ("PAD", dataclasses.replace(_INTEGERS, checks=(_check_padding,))),
    ),
    source="read: the compiler's page of operations; its rounding is not published, so identical "
    "outputs are not proven",
)

MEDIATEK = Target(
    name="mediatek",
    title="MediaTek's NPU",
    kernels="xnnpack",
    batch_size=1,
    elsewhere="the CPU",
    operators=operators(
        ("CONV_2D DEPTHWISE_CONV_2D TRANSPOSE_CONV FULLY_CONNECTED BATCH_MATMUL", _MOST_TYPES),
        ("ADD SUB MUL DIV MAXIMUM MINIMUM SQUARED_DIFFERENCE ABS SQRT RSQRT", _MOST_TYPES),
        ("RELU LEAKY_RELU PRELU HARD_SWISH GELU LOGISTIC TANH SOFTMAX", _MOST_TYPES),
        ("AVERAGE_POOL_2D MAX_POOL_2D MEAN SUM REDUCE_MAX L2_NORMALIZATION", _MOST_TYPES),
        ("RESHAPE TRANSPOSE SLICE STRIDED_SLICE SPLIT UNPACK CONCATENATION TILE", _MOST_TYPES),
        ("PAD PADV2 QUANTIZE DEQUANTIZE CAST GREATER LESS", _MOST_TYPES),
        ("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", _MOST_TYPES),
    ),
    source="read: the list of LiteRT's plugin for MediaTek (2026); the compiler has more "
    "conditions, but it is in no public registry, and its rounding is not published",
)
"""MediaTek's NPUs of phones and tablets, through LiteRT's plugin. The plugin passes these operators
and types to MediaTek's compiler."""

STM32_NPU = Target(
    name="stm32_npu",
    title="the NPU of STM32MP2",
    kernels="xnnpack",
    batch_size=1,
    bits=(8,),
    per_channel=False,
    has_float=False,
    elsewhere="the CPU",
    operators=operators(
        ("CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED TRANSPOSE_CONV ADD SUB MUL", _INTEGERS),
        ("AVERAGE_POOL_2D MAX_POOL_2D MEAN SOFTMAX LOGISTIC TANH RELU RELU6 LEAKY_RELU", _INTEGERS),
        ("PRELU HARD_SWISH ELU CONCATENATION RESHAPE PAD PADV2 RESIZE_BILINEAR", _INTEGERS),
        ("RESIZE_NEAREST_NEIGHBOR QUANTIZE SPLIT STRIDED_SLICE SLICE TRANSPOSE SQUEEZE", _INTEGERS),
        ("EXPAND_DIMS SPACE_TO_DEPTH DEPTH_TO_SPACE MAXIMUM MINIMUM PACK UNPACK", _INTEGERS),
    ),
    source="read: the STM32 model zoo measures a sixth of the speed for weights with a scale per "
    "channel; operators from the documentation; its rounding is not published, so identical "
    "outputs are not proven",
)

STM32N6 = Target(
    name="stm32n6",
    title="the NPU of STM32N6",
    kernels="xnnpack",
    batch_size=1,
    bits=(8,),
    has_float=False,
    elsewhere="the CPU",
    operators=operators(
        ("CONV_2D DEPTHWISE_CONV_2D TRANSPOSE_CONV FULLY_CONNECTED", _INTEGERS_AND_BOOL),
        ("BATCH_MATMUL AVERAGE_POOL_2D MAX_POOL_2D ADD SUB MUL ABS CEIL", _INTEGERS_AND_BOOL),
        ("RELU RELU6 LEAKY_RELU PRELU HARD_SWISH LOGISTIC TANH", _INTEGERS_AND_BOOL),
        ("RESHAPE SQUEEZE EXPAND_DIMS STRIDED_SLICE SPLIT SPLIT_V TRANSPOSE", _INTEGERS_AND_BOOL),
        ("CONCATENATION PAD PACK UNPACK SPACE_TO_DEPTH", _INTEGERS_AND_BOOL),
        ("RESIZE_NEAREST_NEIGHBOR QUANTIZE CAST EQUAL", _INTEGERS_AND_BOOL),
        ("LOGICAL_AND LOGICAL_OR LOGICAL_NOT", _INTEGERS_AND_BOOL),
    ),
    source="read: the table of TFLite operators in the documentation of ST Edge AI Core 2.2 and "
    "3.0, second-hand; its size limits are not included, and its rounding is not published",
)
"""STM32N6 microcontrollers with the Neural-ART NPU beside a Cortex-M55. Bilinear resizing, means
over an image and softmax run on the CPU."""
