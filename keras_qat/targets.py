"""Where files run: what each place has kernels for, as data."""

from keras_qat.config.targets import (
    CMSIS_NN,
    EDGETPU,
    ESP_NN,
    ETHOS_U55,
    ETHOS_U65,
    ETHOS_U85,
    STM32_NPU,
    TFLM,
    XNNPACK,
    Kernel,
    Problem,
    Site,
    Target,
    get,
    known,
    register,
)
from keras_qat.export.target_problems import problems

__all__ = [
    "CMSIS_NN",
    "EDGETPU",
    "ESP_NN",
    "ETHOS_U55",
    "ETHOS_U65",
    "ETHOS_U85",
    "STM32_NPU",
    "TFLM",
    "XNNPACK",
    "Kernel",
    "Problem",
    "Site",
    "Target",
    "get",
    "known",
    "problems",
    "register",
]
