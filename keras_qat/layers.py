"""The layers of a quantization-aware model."""

from keras_qat.helper_layers.keras_variants import FusedBatchNormalization
from keras_qat.training.layers import Quantize, QuantizeWeights, QuantizeWrapper
from keras_qat.training.scheduled_layer import ScheduledLayer

__all__ = [
    "FusedBatchNormalization",
    "Quantize",
    "QuantizeWeights",
    "QuantizeWrapper",
    "ScheduledLayer",
]
