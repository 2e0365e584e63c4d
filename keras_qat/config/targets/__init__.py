"""Targets: runtimes and devices with the operators that they have, as data.

Each `Target` has a file of its own. `register` makes a target known by its name.
"""

from keras_qat.config.targets.cmsis_nn import CMSIS_NN
from keras_qat.config.targets.coral_npu import CORAL_NPU
from keras_qat.config.targets.edgetpu import EDGETPU
from keras_qat.config.targets.esp_nn import ESP_NN
from keras_qat.config.targets.ethos_u import ETHOS_U55, ETHOS_U65, ETHOS_U85
from keras_qat.config.targets.fault import Fault
from keras_qat.config.targets.litert import XNNPACK
from keras_qat.config.targets.mediatek import MEDIATEK
from keras_qat.config.targets.neutron import NEUTRON
from keras_qat.config.targets.problem import Problem
from keras_qat.config.targets.stm32_npu import STM32_NPU
from keras_qat.config.targets.stm32n6 import STM32N6
from keras_qat.config.targets.target import Kernel, Target, get, known, register
from keras_qat.config.targets.tflm import TFLM
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
