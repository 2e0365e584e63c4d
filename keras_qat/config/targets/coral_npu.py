"""Google's Coral NPU, a RISC-V processor with vectors, which runs TFLite Micro."""

from __future__ import annotations

import dataclasses

from keras_qat.config.targets.target import Target
from keras_qat.config.targets.tflm import TFLM

CORAL_NPU: Target = dataclasses.replace(
    TFLM,
    name="coral_npu",
    title="TFLite Micro on the Coral NPU",
    source="read: its sources build TFLite Micro with convolutions, dense layers, pooling and "
    "sigmoid of their own, whose values their tests compare with TFLite Micro's",
)
