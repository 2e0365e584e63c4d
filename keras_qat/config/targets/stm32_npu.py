"""The NPU of STM32MP2 processors."""

from __future__ import annotations

from keras_qat.config.targets.target import Kernel, Target, operators

_KERNEL = Kernel(("int8", "uint8", "int32"))

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
        ("CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED TRANSPOSE_CONV ADD SUB MUL", _KERNEL),
        ("AVERAGE_POOL_2D MAX_POOL_2D MEAN SOFTMAX LOGISTIC TANH RELU RELU6 LEAKY_RELU", _KERNEL),
        ("PRELU HARD_SWISH ELU CONCATENATION RESHAPE PAD PADV2 RESIZE_BILINEAR", _KERNEL),
        ("RESIZE_NEAREST_NEIGHBOR QUANTIZE SPLIT STRIDED_SLICE SLICE TRANSPOSE SQUEEZE", _KERNEL),
        ("EXPAND_DIMS SPACE_TO_DEPTH DEPTH_TO_SPACE MAXIMUM MINIMUM PACK UNPACK", _KERNEL),
    ),
    source="read: the STM32 model zoo measures weights with a scale for each channel six times as "
    "slow; operators by its documentation; its rounding is not published, so none is proven",
)
