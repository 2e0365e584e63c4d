"""Configurations of float models, which remember whether a model is a `Sequential`."""

from __future__ import annotations

from typing import Any

from keras_qat.graph.rebuild_model import get_functional_config
from keras_qat.keras2.backend import keras

_INPUT = "InputLayer"


def float_config_of(model: keras.Model) -> dict[str, Any]:
    """Returns a functional configuration of a model, marked if the model is a `Sequential`."""
    config = get_functional_config(model)
    if type(model) is keras.Sequential:
        entries = [entry for entry in config["layers"] if entry["class_name"] != _INPUT]
        # A loss that was added to the model has an entry, but is no layer.
        is_whole = [entry["config"].get("name") for entry in entries] == [
            layer.name for layer in model.layers
        ]
        config["sequential"] = is_whole
    return config


def from_config(config: dict[str, Any]) -> Any:
    """Makes a model of a configuration that `float_config_of` returned."""
    if not config.pop("sequential", False):
        return keras.Model.from_config(config)
    return keras.Sequential.from_config({"name": config["name"], "layers": config["layers"]})
