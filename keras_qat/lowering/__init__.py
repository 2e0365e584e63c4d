"""Lowering: rewrites a graph of Keras layers as a graph of operators (`Op`)."""

from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.passes import lower

__all__ = ["LoweringContext", "lower"]
