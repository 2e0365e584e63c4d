"""The layers that a quantization-aware model is made of."""

from keras_qat.helper_layers.contrib_batch_norm import FusedBatchNormalization
from keras_qat.training.layers.quantize import Quantize
from keras_qat.training.layers.quantize_wrapper import QuantizeWrapper
from keras_qat.training.layers.scheduled_layer import ScheduledLayer
from keras_qat.training.layers.weights_only import QuantizeWeights

__all__ = [
    "FusedBatchNormalization",
    "Quantize",
    "QuantizeWeights",
    "QuantizeWrapper",
    "ScheduledLayer",
]
