"""Copies trained weights back to a Keras 3 model."""

from __future__ import annotations

from typing import Any

from keras_qat.imports.keras3 import give_weights
from keras_qat.imports.keras3.backend import check_model
from keras_qat.keras2.backend import keras
from keras_qat.keras2.readability import check_readable
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.rewriting.strip import strip_quantization


def to_keras_3(model: keras.Model, keras_3_model: Any) -> Any:
    """Assigns the weights of a model to its original Keras 3 model, or to an equal model.

    Args:
        model: a model that `from_keras_3` returned, or a quantized copy of that model or of the
            Keras 3 model. A quantized copy is first converted by `strip_quantization`.
        keras_3_model: the Keras 3 model. Only its weights change.

    Returns:
        The Keras 3 model.

    Raises:
        ValueError: if the models do not have the same layers with the same weights.

    Example:
        >>> qat = keras_qat.quantize_model(keras_3_model)
        >>> qat.fit(...)
        >>> keras_qat.to_keras_3(qat, keras_3_model).save("trained.keras")
    """
    check_model(keras_3_model)
    plain = strip_quantization(model) if isinstance(model, QuantizedModel) else model
    check_readable(plain)
    give_weights(plain, keras_3_model)
    return keras_3_model
