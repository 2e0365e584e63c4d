"""Keeps `keras_qat.rewrite.QuantizedModel` importable, because files of version 0.1.0 need it."""

from keras_qat.rewriting.quantized_model import QuantizedModel

__all__ = ["QuantizedModel"]
