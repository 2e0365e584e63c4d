"""Models of Keras 3: converted to Keras 2, and their weights brought back.

The only package that touches Keras 3's internals. Keras 3 is imported where a model of it is met.
"""

from keras_qat.frontend.keras3.convert_model import as_keras_2, from_keras_3

__all__ = ["as_keras_2", "from_keras_3"]
