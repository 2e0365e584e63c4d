"""The check whether settings of layers, such as activations, were changed after quantization."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.origins import KNOWN, package_of
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.quantizers import PREFIX

OF_TRAINING = ("dropout", "rate", "seed", "momentum", "initializer", "regularizer", "constraint")
"""Ends of the names of settings that inference does not depend on."""

VALUES = (tf.Tensor, tf.Variable, np.ndarray)
"""What holds values that `adapt` or `assign` may change, and not a setting."""

NONE = object()
"""What an attribute holds that a layer does not have."""

Settings = list[tuple[Any, dict[str, Any]]]
"""Layers, each with the attributes that hold what its constructor was given."""


def settings_of(model: Any) -> Settings:
    """Returns the settings of a quantized model's layers. Users' own layers may change theirs."""
    layers = [layer for layer in list_layers(model) if package_of(type(layer)) in KNOWN]
    settings = [(x, _own_settings(x)) for x in layers if not isinstance(x, keras.Model)]
    for layer, own in settings:
        if isinstance(layer, QuantizeWrapper):  # Users look for the inner layer's there.
            names = {name for inner in layer.sublayers for name in _own_settings(inner)}
            own.update({name: vars(layer).get(name, NONE) for name in names})
    return settings


def check_settings(model: Any) -> None:
    """Raises a `ValueError` if a setting was changed after the model was quantized or loaded.

    Training, inference and files were planned for the settings that layers had then, and each would
    take in or ignore other ones.
    """
    for layer, before in getattr(model, "settings", ()):
        now = vars(layer)
        for name, value in before.items():
            if now.get(name, NONE) is value:
                continue
            if isinstance(value, (bool, int, float, str, tuple)) and now.get(name) == value:
                continue
            raise ValueError(
                f"'{name}' of layer '{layer.name.removeprefix(PREFIX)}' was changed after "
                f"'{model.name}' was quantized, which planned for what it was before. Set it in "
                f"the float model (keras_qat.strip_quantization returns it), and quantize that."
            )


def _own_settings(layer: Any) -> dict[str, Any]:
    parameters = inspect.signature(type(layer).__init__).parameters
    return {
        name: vars(layer)[name]
        for name in parameters
        if name in vars(layer)
        and not name.endswith(OF_TRAINING)
        and not isinstance(vars(layer)[name], VALUES)
    }
