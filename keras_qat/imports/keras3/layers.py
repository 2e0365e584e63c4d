"""Converts layers of Keras 3 to Keras 2: classes, and the options that differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_qat.imports.keras3 import activations
from keras_qat.imports.keras3.backend import is_layer, keras_3
from keras_qat.keras2.backend import keras

RENAMED: dict[str, dict[str, str]] = {"LeakyReLU": {"negative_slope": "alpha"}}
"""Layer class -> its options that have another name in Keras 2."""

NEUTRAL: dict[str, tuple[Any, ...]] = {"data_format": ("channels_last",), "rms_scaling": (False,)}
"""Option that Keras 2 lacks in some layers -> values that mean what Keras 2 does without it."""

WITHOUT_EFFECT = {"encoding", "seed", "use_cudnn", "value_range", "vocabulary_size"}
"""Options that Keras 2 lacks in some layers and that change no output at inference."""

APPLICATIONS = {
    "CustomScaleLayer": keras.applications.InceptionResNetV2,
    "LayerScale": keras.applications.ConvNeXtTiny,
    "StochasticDepth": keras.applications.ConvNeXtTiny,
}
"""Layer class of `keras.applications` -> a constructor from the module that defines it."""

_BASE = {"activity_regularizer", "dtype", "name", "trainable", "zero_output_for_mask"}
"""Options that Keras 2 takes as `**kwargs`."""

_PLURAL = {"initializer": "initializers", "regularizer": "regularizers"}
_PLURAL["constraint"] = "constraints"


def counterpart(layer: Any, custom: Mapping[str, Any]) -> Any:
    """Returns the Keras 2 class, or the user's replacement, for a layer; None if there is none."""
    name = type(layer).__name__
    if name in custom:
        return custom[name]
    if not _is_keras_class(layer):
        return None
    if name in APPLICATIONS:
        return getattr(inspect.getmodule(APPLICATIONS[name]), name)
    return getattr(keras.layers, name, None)


def convert_layer(layer: Any, custom: Mapping[str, Any], convert: Callable[[Any], Any]) -> Any:
    """Makes an unbuilt Keras 2 layer that computes what a layer of Keras 3 does.

    Args:
        layer: the layer.
        custom: name of a class that Keras 2 lacks -> the user's class.
        convert: converts a layer inside the layer.

    Raises:
        ValueError: if Keras 2 lacks the layer or one of its options.
    """
    make = counterpart(layer, custom)
    if make is None:
        raise _refusal(layer, "Keras 2 has no such class")
    if type(layer).__name__ == "Lambda" and _is_keras_class(layer):
        return _lambda(layer)
    config = {key: _value(layer, key, value, convert) for key, value in _config(layer).items()}
    if type(layer).__name__ in custom:
        return make(**config)
    known = _options(make)
    for key in list(config):
        if key in known:
            continue
        if key not in WITHOUT_EFFECT and not _is_neutral(layer, key):
            raise _refusal(layer, f"Keras 2 does not have its option {key}={config[key]!r}")
        del config[key]
    try:
        return make(**config)
    except (TypeError, ValueError) as error:
        raise _refusal(layer, f"Keras 2 refuses its options: {error}") from error


def _config(layer: Any) -> dict[str, Any]:
    """Returns a layer's configuration with Keras 2's names and the entries that Keras 3 omits."""
    name, config = type(layer).__name__, layer.get_config()
    if _is_keras_class(layer):
        if name == "Bidirectional":
            _plain_bidirectional(config)
        if hasattr(layer, "get_vocabulary"):  # Keras 3 omits an adapted one.
            words = layer.get_vocabulary(include_special_tokens=False)
            config["vocabulary"] = np.asarray(words).tolist()
            del config["dtype"]
        if hasattr(layer, "output_padding"):  # Keras 3.8 omits it.
            config["output_padding"] = layer.output_padding
        if name == "Discretization":
            config["bin_boundaries"], config["num_bins"] = layer.bin_boundaries, None
    renamed = RENAMED.get(name, {})
    return {renamed.get(key, key): value for key, value in config.items()}


def _plain_bidirectional(config: dict[str, Any]) -> None:
    """Removes the backward layer if it equals the forward layer but for its direction."""
    forward, backward = (dict(config[key]["config"]) for key in ("layer", "backward_layer"))
    for half in (forward, backward):
        del half["name"], half["go_backwards"]
    if forward == backward and config["backward_layer"]["config"]["go_backwards"]:
        del config["backward_layer"]


def _value(layer: Any, key: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    """Converts an entry of a configuration of Keras 3 for Keras 2."""
    inner = getattr(layer, key, None)
    if isinstance(inner, (list, tuple)) and inner and all(map(is_layer, inner)):
        return [convert(layer) for layer in inner]
    if key == "layer" and type(layer).__name__ == "Bidirectional":
        inner = layer.forward_layer
    if is_layer(inner):
        return convert(inner)
    if key.endswith("activation") and callable(inner):
        activation = activations.to_keras_2(inner, keras_3())
        if activation is None:
            raise _refusal(layer, f"Keras 2 does not have its activation '{inner.__name__}'")
        return activation
    if key == "dtype":
        return _policy(layer)
    kind = _PLURAL.get(key.rsplit("_", 1)[-1])
    if kind and isinstance(value, dict):
        return _part(layer, kind, value)
    if isinstance(value, dict) and value.get("class_name") == "__numpy__":
        return np.array(value["config"]["value"], value["config"]["dtype"])
    return value


def _policy(layer: Any) -> str:
    """Returns the name of a layer's dtype policy."""
    policy = layer.dtype_policy
    if getattr(policy, "quantization_mode", None):
        raise _refusal(layer, f"it is quantized already, by the policy '{policy.name}'")
    return str(policy.name)


def _part(layer: Any, kind: str, value: dict[str, Any]) -> Any:
    """Makes an initializer (any will do, as weights are copied), regularizer or constraint."""
    part_class = getattr(getattr(keras, kind), value["class_name"], None)
    if part_class is None or not str(value["module"]).startswith("keras"):
        if kind == "initializers":
            return "zeros"
        raise _refusal(layer, f"Keras 2 does not have its {value['class_name']} ({kind})")
    known = _options(part_class)
    return part_class(**{key: entry for key, entry in value["config"].items() if key in known})


def _lambda(layer: Any) -> Any:
    """Makes a Keras 2 Lambda with the same function, which computes with TensorFlow."""
    return keras.layers.Lambda(
        layer.function,
        output_shape=layer._output_shape,
        arguments=layer.arguments,
        name=layer.name,
        dtype=layer.dtype_policy.name,
    )


def _options(layer_class: Any) -> set[str]:
    """Returns the names of the options that a class of Keras 2 takes."""
    names = set(_BASE)
    for base in _initialized(layer_class):
        if base is keras.layers.Layer:
            break
        names.update(inspect.signature(vars(base)["__init__"]).parameters)
    return names


def _initialized(layer_class: Any) -> list[Any]:
    """Returns a class and its base classes that define an `__init__`."""
    return [base for base in layer_class.__mro__[:-1] if "__init__" in vars(base)]


def _is_neutral(layer: Any, key: str) -> bool:
    """Returns whether an option has a value that means what Keras 2 does without it."""
    value = layer.get_config()[key]
    if value is None or value in NEUTRAL.get(key, ()):
        return True
    signatures = [inspect.signature(vars(base)["__init__"]) for base in _initialized(type(layer))]
    defaults = [
        signature.parameters[key].default for signature in signatures if key in signature.parameters
    ]
    return bool(defaults) and bool(value == defaults[0])


def _is_keras_class(layer: Any) -> bool:
    """Returns whether a layer's class is Keras 3's own."""
    return type(layer).__module__.split(".")[0] == "keras"


def _refusal(layer: Any, reason: str) -> ValueError:
    name = type(layer).__name__
    return ValueError(
        f"Layer '{layer.name}' ({name}) of Keras 3 cannot be converted: {reason}. Change that, or "
        f"pass a class for it: "
        f"keras_qat.from_keras_3(model, custom_objects={{'{name}': a_keras_2_layer_class}})."
    )
