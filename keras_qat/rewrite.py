"""Keeps the import path of `QuantizedModel` that model files of version 0.1.0 contain."""

from keras_qat.rewriting.quantized_model import QuantizedModel

__all__ = ["QuantizedModel"]
