"""TFLite Micro with the kernels of ESP-NN, for the ESP32."""

from __future__ import annotations

import dataclasses

from keras_qat.config.targets.target import Target
from keras_qat.config.targets.tflm import TFLM

ESP_NN: Target = dataclasses.replace(
    TFLM,
    name="esp_nn",
    title="TFLite Micro with ESP-NN",
    source="read: ESP-NN's sources; rounding as TFLite Micro's unless built with SKIP_NUDGE",
)
