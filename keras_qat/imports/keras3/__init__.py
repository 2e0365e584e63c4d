"""Converts models of Keras 3 to Keras 2, and carries their weights back.

No other package touches Keras 3's internals. Keras 3 is imported only when one of its models comes
in.
"""

from keras_qat.imports.keras3.convert_model import as_keras_2, from_keras_3

__all__ = ["as_keras_2", "from_keras_3"]
