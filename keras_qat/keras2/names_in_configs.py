"""Names of layers in configurations of models, for classes whose constructor takes no name.

Keras leaves the name out of the configuration of such a layer, and counts when it makes another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import rename


def note_names(model: Any, config: dict[str, Any]) -> None:
    """Notes the names of a model's layers in its configuration, in place."""
    for layer, entry in _pairs(model, config):
        entry.setdefault("name", layer.name)


def restore_names(model: Any, config: dict[str, Any]) -> None:
    """Gives the layers of a model that was made of a configuration the names that it notes."""
    for layer, entry in _pairs(model, config):
        if entry.get("name", layer.name) != layer.name:
            rename(layer, entry["name"])


def _pairs(model: Any, config: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields each layer of a model and of the models in it, and its configuration."""
    layers = [item for item in model.layers if not isinstance(item, keras.layers.InputLayer)]
    entries = [entry for entry in config.get("layers", ()) if entry["class_name"] != "InputLayer"]
    for layer, entry in zip(layers, entries, strict=False):
        yield layer, entry
        if isinstance(layer, keras.Model) and "layers" in entry["config"]:
            yield from _pairs(layer, entry["config"])
