"""Where files run: what each place has kernels for, as data.

A target is one `Target`, in a file of its own. `register` makes it known by its name.
"""

from keras_qat.targets.edgetpu import EDGETPU
from keras_qat.targets.esp_nn import ESP_NN
from keras_qat.targets.ethos_u import ETHOS_U55, ETHOS_U65, ETHOS_U85
from keras_qat.targets.problems import Problem, Site, problems
from keras_qat.targets.stm32_npu import STM32_NPU
from keras_qat.targets.target import Kernel, Target, get, known, register
from keras_qat.targets.tflm import CMSIS_NN, TFLM
from keras_qat.targets.xnnpack import XNNPACK

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

for _target in (
    *(XNNPACK, TFLM, CMSIS_NN, ETHOS_U55, ETHOS_U65, ETHOS_U85),
    *(EDGETPU, STM32_NPU, ESP_NN),
):
    register(_target)
