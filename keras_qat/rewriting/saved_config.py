"""Creates and reads configurations of quantized models and of float models."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from keras_qat.arithmetic.kernel_families import XNNPACK, find_saved_family
from keras_qat.config.recipe import Recipe
from keras_qat.config.targets.target import find_or_warn
from keras_qat.graph.rebuild_model import get_functional_config
from keras_qat.keras2.backend import keras
from keras_qat.keras2.configurations import find_missing_config
from keras_qat.keras2.layers_and_models import name_outputs, restore_names
from keras_qat.keras2.safe_loading import get_safe_mode
from keras_qat.messages import warn_caller
from keras_qat.training.schedule import (
    ask_for_integers,
    get_float_reason,
    is_integer_requested,
    leave_in_float,
)
from keras_qat.training.steps.custom_training import from_class_config

Config = dict[str, Any]

LOADER = "import keras_qat; keras_qat.keras.models.load_model(path): Keras 3 cannot load it"
"""The first entry of a configuration. Error messages of Keras 3 about a saved model show it."""

ENTRIES: Config = {
    "load_with": LOADER,
    "recipe": None,
    "float_config": None,
    "float_masks": (),
    "differing_outputs": "",
    "output_names": None,
    "float_layers": {},
    "asked_for": (),
    "kernels": XNNPACK.name,
    "pack_int4": False,
    "file_outputs": {},
    "trained_as": None,
    "target": None,
}
"""Entries that keras_qat adds to Keras' configuration of a model, with default values."""

ALWAYS = ("recipe", "float_config", "output_names", "float_layers", "asked_for", "kernels")
"""Entries that are saved even if they have the default value."""


REQUIRED = ("recipe", "float_config", "output_names")


def describe_model(model: keras.Model) -> Config:
    layers = {layer.name: layer for layer in model.layers}
    config = {**get_functional_config(model), "trainable": model.trainable}
    for entry in config["layers"]:
        if layer := layers.get(entry["name"]):  # Added losses have other names.
            entry["config"].update(find_missing_config(layer))
    trained_as, target = model.trained_as, model.target
    own = {
        "load_with": LOADER,
        "recipe": None if model._recipe is None else model._recipe.to_config(),
        "float_config": _get_serializable(model.float_config),
        "float_masks": list(model.float_masks),
        "differing_outputs": model.differing_outputs,
        "output_names": list(model.output_names),
        "float_layers": {
            name: reason for name, layer in layers.items() if (reason := get_float_reason(layer))
        },
        "asked_for": [name for name, layer in layers.items() if is_integer_requested(layer)],
        "kernels": model.kernels,
        "pack_int4": model.pack_int4,
        "file_outputs": dict(model.file_outputs),
        "trained_as": trained_as and {**trained_as, "left_out": list(model.left_out)},
        "target": target and target.name,
    }
    saved = {name: x for name, x in own.items() if x or name in ALWAYS}
    return {"load_with": LOADER, **config, **saved}


def split_config(config: Config) -> tuple[Config, Config]:
    """Splits a configuration into Keras' entries and `ENTRIES`, and adds default values."""
    of_keras = {name: value for name, value in config.items() if name not in ENTRIES}
    required = {name: config[name] for name in REQUIRED}
    return of_keras, {**ENTRIES, **{n: config[n] for n in ENTRIES if n in config}, **required}


def restore_model(
    model: keras.Model, config: Config, saved: Config, custom_objects: Config | None
) -> None:
    """Sets attributes of a loaded model from `saved`, which `split_config` returned."""
    restore_names(model, config)
    model.safe_mode = get_safe_mode() is not False
    if saved["recipe"] is not None:  # None if Keras saved it before `make_exact`.
        model.keep_recipe(Recipe.from_config(saved["recipe"]))
    model.set_untracked(float_config=saved["float_config"], float_masks=saved["float_masks"])
    model.differing_outputs = saved["differing_outputs"]
    name_outputs(model, saved["output_names"])
    model.set_untracked(file_outputs=dict(saved["file_outputs"]))
    reasons = saved["float_layers"]
    if not isinstance(reasons, dict):  # Earlier files have no reasons.
        reasons = dict.fromkeys(reasons, "left in float")
    for name, reason in reasons.items():
        leave_in_float(model.get_layer(name), reason)
    for name in saved["asked_for"]:
        ask_for_integers(model.get_layer(name))
    model.kernels = find_saved_family(saved["kernels"], model.name).name
    model.pack_int4 = saved["pack_int4"]
    if saved["target"] is not None:
        model.target = find_or_warn(saved["target"], model.name)
    if saved["trained_as"] is not None:
        _restore_training(model, dict(saved["trained_as"]), custom_objects)


def _restore_training(model: keras.Model, config: Config, custom_objects: Config | None) -> None:
    """Add `train_step` and other methods of the class in `config`. Warn if this is impossible."""
    left_out, class_config = config.pop("left_out"), config
    if config["config"] is None:
        class_config = {**config, "config": model.float_config}
    try:
        original = from_class_config(class_config, custom_objects)
    except ValueError as error:
        name = config["class_name"]
        warn_caller(
            f"'{model.name}' is loaded without train_step and other methods of {name}, because "
            f"that class cannot be created: {error} Register the class or pass it in "
            f"custom_objects, with a get_config that its constructor accepts. Or load only the "
            f"weights into a model that quantize_model makes from a {name}."
        )
        return
    model.keep_training(original, left_out)


def _get_serializable(config: Config | None) -> Config | None:
    """Return `config`, or None if Keras cannot save its contents."""
    try:
        with contextlib.suppress(ValueError):  # Keras raises this while it saves a SavedModel.
            json.dumps(keras.saving.serialize_keras_object(config))
    except TypeError:
        return None
    return config


def get_float_config(model: keras.Model) -> Config:
    """Returns a model's functional configuration, with "sequential": True for a `Sequential`."""
    config = get_functional_config(model)
    if type(model) is keras.Sequential:
        entries = [entry for entry in config["layers"] if entry["class_name"] != "InputLayer"]
        # An added loss has an entry, but is no layer.
        names = [entry["config"].get("name") for entry in entries]
        config["sequential"] = names == [layer.name for layer in model.layers]
    return config


def make_float_model(config: Config) -> keras.Model:
    """Creates a model from the result of `get_float_config`."""
    if not config.pop("sequential", False):
        return keras.Model.from_config(config)
    return keras.Sequential.from_config({"name": config["name"], "layers": config["layers"]})
