"""Provides `QuantizedModel` for model files of version 0.1.0, which import it from this module."""

from keras_qat.rewriting.quantized_model import QuantizedModel

__all__ = ["QuantizedModel"]
