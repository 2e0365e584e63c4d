"""Finds Keras 3, checks Keras 3 models, and refuses Keras 3 objects in Keras 2 models."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_qat.keras2 import backend as keras2

if TYPE_CHECKING:
    from keras import Model as Keras3Model
    from keras.layers import Layer as Keras3Layer
else:
    Keras3Model = Keras3Layer = Any

_OTHER_NAMES = {"PyDataset": "Sequence"}
"""Maps names of Keras 3 classes to the different names in Keras 2."""


def keras_3() -> Any:
    """Returns the module `keras` of Keras 3.

    Raises:
        ImportError: if the package `keras` is not installed or is Keras 2.
    """
    try:
        import keras
    except ImportError:
        keras = None
    if not _is_keras_3(keras):
        raise ImportError(
            "Models of Keras 3 need both Keras 3 and Keras 2, with TensorFlow 2.16 or later: "
            "pip install 'keras-qat[keras3]' 'tensorflow>=2.16'"
        )
    return keras


def find_loaded_keras_3() -> Any:
    """Returns the module `keras` of Keras 3, or None if no code has imported it."""
    keras = sys.modules.get("keras")
    return keras if _is_keras_3(keras) else None


def _is_keras_3(module: object) -> bool:
    # With TensorFlow 2.15 the package `keras` is Keras 2.
    return hasattr(module, "KerasTensor") and keras2.keras is not module


def refuse_files(package: str, name: str, advice: str) -> None:
    """Makes Keras 3 raise a `ValueError` if it loads a file that contains a certain Keras 2 class.

    The class is registered as `package>name`. The message is `advice`. Does nothing if Keras 3 was
    not imported.
    """
    keras = find_loaded_keras_3()
    if keras is None:
        return

    class Refused:
        def get_config(self) -> dict[str, Any]:
            return {}

        @classmethod
        def from_config(cls, config: dict[str, Any], custom_objects: object = None) -> Any:
            raise ValueError(advice)

    keras.saving.register_keras_serializable(package, name)(Refused)


def is_of_keras_3(value: object) -> bool:
    """Returns True if the class of a value is from Keras 3. Does not import Keras 3."""
    packages = {base.__module__.split(".")[0] for base in type(value).__mro__}
    return "keras" in packages and not isinstance(value, keras2.keras.layers.Layer)


def is_layer(value: object) -> bool:
    return isinstance(value, keras_3().layers.Layer)


def is_model(value: object) -> bool:
    return isinstance(value, keras_3().Model)


def check_model(model: Any) -> None:
    """Raises a `ValueError` with advice if a Keras 3 model cannot be converted."""
    keras = keras_3()
    name, kind = getattr(model, "name", model), type(model).__name__
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"Expected a model of Keras 3, got {kind} '{name}'. Models of Keras 2 need no "
            f"conversion: pass them to keras_qat.quantize_model."
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
            f"{kind} '{name}' is a subclassed model of Keras 3, and keras_qat cannot read its "
            f"call(). Express it in the functional style, keras.Model(inputs, outputs)."
        )


class RefusesKeras3:
    """Keras 2 model that raises a clear error for optimizers, metrics or callbacks of Keras 3."""

    def _validate_compile(self, optimizer: object, metrics: object, **kwargs: object) -> None:
        _refuse_objects("optimizer", "optimizers", optimizer)
        _refuse_objects("metrics", "metrics", metrics)
        super()._validate_compile(optimizer, metrics, **kwargs)  # type: ignore[misc]

    def fit(self, x: Any = None, *args: object, **kwargs: object) -> Any:
        """Trains, like `fit` of Keras."""
        return super().fit(x, *args, **_check(x, kwargs))  # type: ignore[misc]

    def evaluate(self, x: Any = None, *args: object, **kwargs: object) -> Any:
        """Returns losses and metrics, like `evaluate` of Keras."""
        return super().evaluate(x, *args, **_check(x, kwargs))  # type: ignore[misc]

    def predict(self, x: Any, *args: object, **kwargs: object) -> Any:
        """Returns outputs, like `predict` of Keras."""
        return super().predict(x, *args, **_check(x, kwargs))  # type: ignore[misc]


def _check(x: object, kwargs: dict[str, Any]) -> dict[str, Any]:
    _refuse_objects("x", "utils", x)
    _refuse_objects("callbacks", "callbacks", kwargs.get("callbacks"))
    return kwargs


def _refuse_objects(argument: str, module: str, values: object) -> None:
    """Raise a `TypeError` if an argument is, or contains, an object of Keras 3.

    Args:
        argument: the name of the argument.
        module: the name of the Keras module with suitable classes, such as "optimizers".
        values: an object, or a list or dict of objects.
    """
    if find_loaded_keras_3() is None:
        return
    for value in tf.nest.flatten(values):
        kind = type(value)
        bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "keras"]
        if bases:
            base_name = bases[0].__name__
            twin = f"keras_qat.keras.{module}.{_OTHER_NAMES.get(base_name, base_name)}"
            advice = f"Use {twin}" if kind is bases[0] else f"Derive it from {twin}"
            raise TypeError(
                f"{argument}: {kind.__name__} is from Keras 3, but the model is a Keras 2 model. "
                f"{advice}."
            )
