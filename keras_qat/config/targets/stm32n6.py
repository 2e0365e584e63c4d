"""STM32N6 microcontrollers with ST's Neural-ART NPU, beside a Cortex-M55."""

from __future__ import annotations

from keras_qat.config.targets.target import Kernel, Target, operators

_KERNEL = Kernel(("int8", "uint8", "int32", "bool"))

STM32N6 = Target(
    name="stm32n6",
    title="the NPU of STM32N6",
    kernels="xnnpack",
    batch_size=1,
    bits=(8,),
    has_float=False,
    elsewhere="the CPU",
    operators=operators(
        ("CONV_2D DEPTHWISE_CONV_2D TRANSPOSE_CONV FULLY_CONNECTED BATCH_MATMUL", _KERNEL),
        ("AVERAGE_POOL_2D MAX_POOL_2D ADD SUB MUL ABS CEIL", _KERNEL),
        ("RELU RELU6 LEAKY_RELU PRELU HARD_SWISH LOGISTIC TANH", _KERNEL),
        ("RESHAPE SQUEEZE EXPAND_DIMS STRIDED_SLICE SPLIT SPLIT_V TRANSPOSE", _KERNEL),
        ("CONCATENATION PAD PACK UNPACK SPACE_TO_DEPTH RESIZE_NEAREST_NEIGHBOR", _KERNEL),
        ("QUANTIZE CAST EQUAL LOGICAL_AND LOGICAL_OR LOGICAL_NOT", _KERNEL),
    ),
    source="read: the table of TFLite operators in the documentation of ST Edge AI Core 2.2 and "
    "3.0, second-hand; its limits of sizes were not, and its rounding is not published",
)
"""Bilinear resizing, means over an image and softmax are left to the CPU."""
