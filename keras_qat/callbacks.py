"""Keras callbacks: quantization delay, freezing of statistics and ranges, and logging."""

from keras_qat.training.callbacks import (
    FreezeBatchNorm,
    FreezeOscillations,
    FreezeRanges,
    LogQuantization,
    QuantDelay,
)

__all__ = [
    "FreezeBatchNorm",
    "FreezeOscillations",
    "FreezeRanges",
    "LogQuantization",
    "QuantDelay",
]
