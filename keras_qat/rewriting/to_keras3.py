"""The verb `to_keras_3`: trained weights for the Keras 3 model that they came from."""

from __future__ import annotations

from typing import Any

from keras_qat.imports.keras3.backend import check_model
from keras_qat.imports.keras3.weights import give_weights
from keras_qat.keras2.readability import check_readable
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.rewriting.strip import strip_quantization


def to_keras_3(model: Any, keras_3_model: Any) -> Any:
    """Gives a Keras 3 model the weights of a model that was made from it or from an equal one.

    Args:
        model: the model that `from_keras_3` returned, or one that `quantize_model` made of it or of
            the Keras 3 model: then the weights are those of `strip_quantization(model)`.
        keras_3_model: the Keras 3 model. Its weights change, nothing else.

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
