"""Lowering: turns a graph of Keras layers into a graph of known operators."""

from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.passes import lower

__all__ = ["LoweringContext", "lower"]
