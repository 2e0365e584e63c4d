"""Converts the classes and options of Keras 3 layers to Keras 2."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_qat.imports.keras3.backend import Keras3Layer, is_layer, keras_3
from keras_qat.imports.keras3.operations import find_activation
from keras_qat.keras2.backend import keras

_RENAMED: dict[str, dict[str, str]] = {"LeakyReLU": {"negative_slope": "alpha"}}
"""For each layer class, maps names of options in Keras 3 to names in Keras 2."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {"data_format": ("channels_last",), "rms_scaling": (False,)}
"""Options that some Keras 2 layers lack. They are dropped if they have one of these values."""

_WITHOUT_EFFECT = {"encoding", "seed", "use_cudnn", "value_range", "vocabulary_size"}
"""Options that some Keras 2 layers lack. They are dropped, because inference ignores them."""

_APPLICATIONS = {
    "CustomScaleLayer": keras.applications.InceptionResNetV2,
    "LayerScale": keras.applications.ConvNeXtTiny,
    "StochasticDepth": keras.applications.ConvNeXtTiny,
}
"""Maps each layer that Keras does not export to an exported function from the same module."""

_BASE = {"activity_regularizer", "dtype", "name", "trainable", "zero_output_for_mask"}
"""Options that Keras 2 layers accept in `**kwargs`, so signatures do not list them."""

_MODULES = {
    "initializer": "initializers",
    "regularizer": "regularizers",
    "constraint": "constraints",
}


def find_counterpart(layer: Keras3Layer, custom: Mapping[str, type]) -> Any:
    """Returns the Keras 2 class that replaces a layer's class. Returns None if there is none."""
    name = type(layer).__name__
    if name in custom:
        return custom[name]
    if not _is_keras_class(layer):
        return None
    if name in _APPLICATIONS:
        return getattr(inspect.getmodule(_APPLICATIONS[name]), name)
    return getattr(keras.layers, name, None)


def convert_layer(
    layer: Keras3Layer, custom: Mapping[str, type], convert: Callable[[Keras3Layer], Any]
) -> keras.layers.Layer:
    """Creates an unbuilt Keras 2 layer that is equivalent to a layer of Keras 3.

    Args:
        layer: the layer.
        custom: maps names of classes that Keras 2 lacks to the user's classes.
        convert: function that converts an inner layer, such as the layer in a TimeDistributed.

    Raises:
        ValueError: if Keras 2 lacks the layer or an option of the layer.
    """
    make = find_counterpart(layer, custom)
    if make is None:
        raise _make_error(layer, "Keras 2 has no such class")
    if type(layer).__name__ == "Lambda" and _is_keras_class(layer):
        return keras.layers.Lambda(
            layer.function,
            output_shape=layer._output_shape,
            arguments=layer.arguments,
            name=layer.name,
            dtype=layer.dtype_policy.name,
        )
    config = {
        key: _convert_option(layer, key, value, convert)
        for key, value in _read_config(layer).items()
    }
    if type(layer).__name__ in custom:
        return make(**config)
    known = _list_options(make)
    for key in [key for key in config if key not in known]:
        if key not in _WITHOUT_EFFECT and not _is_neutral(layer, key):
            raise _make_error(layer, f"Keras 2 does not have its option {key}={config[key]!r}")
        del config[key]
    try:
        return make(**config)
    except (TypeError, ValueError) as error:
        raise _make_error(layer, f"Keras 2 refuses its options: {error}") from error


def _read_config(layer: Keras3Layer) -> dict[str, Any]:
    """Return a layer's configuration with the names of Keras 2. Add entries that Keras 3 omits."""
    name, config = type(layer).__name__, layer.get_config()
    if _is_keras_class(layer):
        if name == "Bidirectional":
            _remove_default_backward_layer(config)
        if hasattr(layer, "get_vocabulary"):  # Keras 3 omits an adapted vocabulary.
            words = layer.get_vocabulary(include_special_tokens=False)
            config["vocabulary"] = np.asarray(words).tolist()
            del config["dtype"]
        if hasattr(layer, "output_padding"):  # Keras 3.8 omits this option.
            config["output_padding"] = layer.output_padding
        if name == "Discretization":
            config["bin_boundaries"], config["num_bins"] = layer.bin_boundaries, None
    renamed = _RENAMED.get(name, {})
    return {renamed.get(key, key): value for key, value in config.items()}


def _remove_default_backward_layer(config: dict[str, Any]) -> None:
    """Remove a Bidirectional's backward layer if it equals the one that Keras creates."""
    forward, backward = (dict(config[key]["config"]) for key in ("layer", "backward_layer"))
    for half in (forward, backward):
        del half["name"], half["go_backwards"]
    if forward == backward and config["backward_layer"]["config"]["go_backwards"]:
        del config["backward_layer"]


def _convert_option(
    layer: Keras3Layer, key: str, value: Any, convert: Callable[[Keras3Layer], Any]
) -> Any:
    inner = getattr(layer, key, None)
    if isinstance(inner, (list, tuple)) and inner and all(map(is_layer, inner)):
        return [convert(item) for item in inner]
    if key == "layer" and type(layer).__name__ == "Bidirectional":
        inner = layer.forward_layer
    if is_layer(inner):
        return convert(inner)
    if key.endswith("activation") and callable(inner):
        activation = find_activation(inner, keras_3())
        if activation is None:
            raise _make_error(layer, f"Keras 2 does not have its activation '{inner.__name__}'")
        return activation
    if key == "dtype":
        policy = layer.dtype_policy
        if getattr(policy, "quantization_mode", None):
            raise _make_error(layer, f"it is quantized already, by the policy '{policy.name}'")
        return str(policy.name)
    module = _MODULES.get(key.rsplit("_", 1)[-1])
    if module and isinstance(value, dict):
        return _convert_object(layer, module, value)
    if isinstance(value, dict) and value.get("class_name") == "__numpy__":
        return np.array(value["config"]["value"], value["config"]["dtype"])
    return value


def _convert_object(layer: Keras3Layer, module: str, value: dict[str, Any]) -> Any:
    """Create an initializer, regularizer or constraint.

    Unknown initializers become "zeros", because the initial weights are overwritten later.
    """
    make = getattr(getattr(keras, module), value["class_name"], None)
    if make is None or not str(value["module"]).startswith("keras"):
        if module == "initializers":
            return "zeros"
        raise _make_error(layer, f"Keras 2 does not have its {value['class_name']} ({module})")
    known = _list_options(make)
    return make(**{key: entry for key, entry in value["config"].items() if key in known})


def _list_options(kind: type) -> set[str]:
    names = set(_BASE)
    for base, parameters in _list_constructors(kind):
        if base is keras.layers.Layer:
            break
        names.update(parameters)
    return names


def _list_constructors(kind: type) -> list[tuple[type, Mapping[str, inspect.Parameter]]]:
    return [
        (base, inspect.signature(vars(base)["__init__"]).parameters)
        for base in kind.__mro__[:-1]
        if "__init__" in vars(base)
    ]


def _is_neutral(layer: Keras3Layer, key: str) -> bool:
    """Return True if an option may be dropped, because its value is a default or has no effect."""
    value = layer.get_config()[key]
    if value is None or value in _NEUTRAL.get(key, ()):
        return True
    constructors = _list_constructors(type(layer))
    defaults = [parameters[key].default for _, parameters in constructors if key in parameters]
    return bool(defaults) and bool(value == defaults[0])


def _is_keras_class(layer: Keras3Layer) -> bool:
    return type(layer).__module__.split(".")[0] == "keras"


def _make_error(layer: Keras3Layer, reason: str) -> ValueError:
    name = type(layer).__name__
    return ValueError(
        f"Layer '{layer.name}' ({name}) of Keras 3 cannot be converted: {reason}. Change that, or "
        f"pass a class for it: "
        f"keras_qat.from_keras_3(model, custom_objects={{'{name}': a_keras_2_layer_class}})."
    )
