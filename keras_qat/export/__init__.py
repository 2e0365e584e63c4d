"""Exports of a trained quantization-aware model: TFLite, C++, SavedModel."""

from keras_qat.export.c_source import export_c
from keras_qat.export.saved_model import export_saved_model
from keras_qat.export.tflite import export_tflite
from keras_qat.tflite.metadata import read_metadata

__all__ = ["export_c", "export_saved_model", "export_tflite", "read_metadata"]
