"""Targets: runtimes and devices with the operators they support, as data."""

from keras_qat.config.targets.cmsis_nn import CMSIS_NN
from keras_qat.config.targets.documented import EDGETPU, MEDIATEK, STM32_NPU, STM32N6
from keras_qat.config.targets.ethos_u import ETHOS_U55, ETHOS_U65, ETHOS_U85
from keras_qat.config.targets.litert import XNNPACK
from keras_qat.config.targets.neutron import NEUTRON
from keras_qat.config.targets.target import Fault, Kernel, Problem, Target, get, known, register
from keras_qat.config.targets.tflm import CORAL_NPU, ESP_NN, TFLM
from keras_qat.tflite.reader import Site

__all__ = [
    "CMSIS_NN",
    "CORAL_NPU",
    "EDGETPU",
    "ESP_NN",
    "ETHOS_U55",
    "ETHOS_U65",
    "ETHOS_U85",
    "MEDIATEK",
    "NEUTRON",
    "STM32N6",
    "STM32_NPU",
    "TFLM",
    "XNNPACK",
    "Fault",
    "Kernel",
    "Problem",
    "Site",
    "Target",
    "get",
    "known",
    "register",
]

for _target in (
    *(XNNPACK, TFLM, CMSIS_NN, ETHOS_U55, ETHOS_U65, ETHOS_U85),
    *(EDGETPU, STM32_NPU, STM32N6, NEUTRON, MEDIATEK, ESP_NN, CORAL_NPU),
):
    register(_target)
