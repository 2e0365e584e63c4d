"""The layers that a quantization-aware model is made of."""

from keras_qat.contrib.fused_batch_norm import FusedBatchNormalization
from keras_qat.layers.quantize import Quantize
from keras_qat.layers.scheduled import ScheduledLayer
from keras_qat.layers.weights_only import QuantizeWeights
from keras_qat.layers.wrapper import QuantizeWrapper

__all__ = [
    "FusedBatchNormalization",
    "Quantize",
    "QuantizeWeights",
    "QuantizeWrapper",
    "ScheduledLayer",
]
