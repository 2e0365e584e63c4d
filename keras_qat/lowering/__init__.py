"""Lowering: rewrites a graph of Keras layers as a graph of operators (`Op`).

For example, a Conv2D with a softmax becomes two operators.
"""

from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.passes import lower

__all__ = ["LoweringContext", "lower"]
