"""Finds Keras 3, and checks and reads its models."""

from __future__ import annotations

import sys
from typing import Any

from keras_qat.keras2 import backend as keras2


def keras_3() -> Any:
    """Returns the module `keras` of Keras 3.

    Raises:
        ImportError: if it is not installed, or an older one is.
    """
    try:
        import keras
    except ImportError:
        keras = None
    # With TensorFlow 2.15 the package `keras` is Keras 2.
    if keras is None or not hasattr(keras, "KerasTensor") or keras2.keras is keras:
        raise ImportError(
            "Models of Keras 3 need Keras 3 beside Keras 2, with TensorFlow 2.16 or later: "
            "pip install 'keras-qat[keras3]' 'tensorflow>=2.16'"
        )
    return keras


def loaded_keras_3() -> Any:
    """Returns the module `keras` of Keras 3 if it is loaded, as TensorFlow does itself, or None."""
    keras = sys.modules.get("keras")
    # With TensorFlow 2.15 the package `keras` is Keras 2.
    is_keras_3 = hasattr(keras, "KerasTensor") and keras2.keras is not keras
    return keras if is_keras_3 else None


def refuse_files(package: str, name: str, advice: str) -> None:
    """Lets Keras 3 answer files with a class of Keras 2 by advice, and not by their contents.

    Where Keras 3 is not loaded, nothing is done.
    """
    keras = loaded_keras_3()
    if keras is None:
        return

    class Refused:
        def get_config(self) -> dict[str, Any]:
            return {}

        @classmethod
        def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
            raise ValueError(advice)

    keras.saving.register_keras_serializable(package, name)(Refused)


def is_of_keras_3(value: Any) -> bool:
    """Returns whether a value's class is of Keras 3 or derives from one, without importing it."""
    roots = {base.__module__.split(".")[0] for base in type(value).__mro__}
    return "keras" in roots and not isinstance(value, keras2.keras.layers.Layer)


def is_layer(value: Any) -> bool:
    """Returns whether a value is a layer of Keras 3. Models are layers too."""
    return isinstance(value, keras_3().layers.Layer)


def is_model(value: Any) -> bool:
    """Returns whether a value is a model of Keras 3."""
    return isinstance(value, keras_3().Model)


def check_model(model: Any) -> None:
    """Raises a `ValueError` that says what to do if a model of Keras 3 cannot be read."""
    keras = keras_3()
    name, kind = getattr(model, "name", model), type(model).__name__
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"Expected a model of Keras 3, got {kind} '{name}'. Models of Keras 2 need no "
            f"conversion: keras_qat.quantize_model takes them."
        )
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Keras 3 uses the backend {keras.backend.backend()} here. Save '{name}' and load it "
            f"in a program that sets the environment variable KERAS_BACKEND=tensorflow."
        )
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            f"The Sequential model '{name}' has no input shape yet. Put keras.Input(shape) first "
            f"in it, or call model.build((None, ...)) with its input shape."
        )
    if not isinstance(model, keras.Sequential) and not hasattr(model, "_nodes_by_depth"):
        raise ValueError(
            f"{kind} '{name}' is a subclassed model of Keras 3: its call() cannot be read as "
            f"layers. Express it in the functional style, keras.Model(inputs, outputs)."
        )
