"""Where model files of version 0.1.0 look for `QuantizedModel`."""

from keras_qat.rewriting.quantized_model import QuantizedModel

__all__ = ["QuantizedModel"]
