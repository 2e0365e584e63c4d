"""MediaTek's NPUs of phones and tablets, by way of LiteRT's plugin for them.

Operators and types are those that the plugin hands to MediaTek's compiler.
"""

from __future__ import annotations

from keras_qat.config.targets.target import Kernel, Target, operators

_KERNEL = Kernel(
    ("int4", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "bool"),
)

MEDIATEK = Target(
    name="mediatek",
    title="MediaTek's NPU",
    kernels="xnnpack",
    batch_size=1,
    elsewhere="the CPU",
    operators=operators(
        ("CONV_2D DEPTHWISE_CONV_2D TRANSPOSE_CONV FULLY_CONNECTED BATCH_MATMUL", _KERNEL),
        ("ADD SUB MUL DIV MAXIMUM MINIMUM SQUARED_DIFFERENCE ABS SQRT RSQRT", _KERNEL),
        ("RELU LEAKY_RELU PRELU HARD_SWISH GELU LOGISTIC TANH SOFTMAX", _KERNEL),
        ("AVERAGE_POOL_2D MAX_POOL_2D MEAN SUM REDUCE_MAX L2_NORMALIZATION", _KERNEL),
        ("RESHAPE TRANSPOSE SLICE STRIDED_SLICE SPLIT UNPACK CONCATENATION TILE", _KERNEL),
        ("PAD PADV2 QUANTIZE DEQUANTIZE CAST GREATER LESS", _KERNEL),
        ("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", _KERNEL),
    ),
    source="read: the list of LiteRT's plugin for MediaTek (2026); the compiler itself, which asks "
    "for more, is in no public registry, and its rounding is not published",
)
