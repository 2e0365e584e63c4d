"""The layers that a quantization-aware model is made of."""

from keras_qat.training.layers import (
    FusedBatchNormalization,
    Quantize,
    QuantizeWeights,
    QuantizeWrapper,
    ScheduledLayer,
)

__all__ = [
    "FusedBatchNormalization",
    "Quantize",
    "QuantizeWeights",
    "QuantizeWrapper",
    "ScheduledLayer",
]
