"""Lowering: rewrites a graph of Keras layers so that each call is one operator (`Op`)."""

from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.passes import lower

__all__ = ["LoweringContext", "lower"]
