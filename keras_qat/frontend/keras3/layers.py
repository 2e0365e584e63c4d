"""Layers of Keras 3 as layers of Keras 2: classes, and the options that differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.keras3 import activations
from keras_qat.frontend.keras3.backend import is_layer, keras_3

__all__ = ["convert_layer", "counterpart"]

RENAMED: dict[str, dict[str, str]] = {"LeakyReLU": {"negative_slope": "alpha"}}
"""Layer class -> its options that Keras 2 knows under another name."""

NEUTRAL: dict[str, tuple[Any, ...]] = {"data_format": ("channels_last",), "rms_scaling": (False,)}
"""Options that Keras 2 lacks in some layers -> their values that mean what it does without them."""

WITHOUT_EFFECT = {"encoding", "seed", "use_cudnn", "value_range", "vocabulary_size"}
"""Options that Keras 2 lacks in some layers and that change no output at inference."""

APPLICATIONS = {
    "CustomScaleLayer": keras.applications.InceptionResNetV2,
    "LayerScale": keras.applications.ConvNeXtTiny,
    "StochasticDepth": keras.applications.ConvNeXtTiny,
}
"""Layer class of `keras.applications` -> a constructor beside which Keras 2 defines it."""

_BASE = {"activity_regularizer", "dtype", "name", "trainable", "zero_output_for_mask"}
"""Options that Keras 2 takes as `**kwargs`."""

_PLURAL = {"initializer": "initializers", "regularizer": "regularizers"}
_PLURAL["constraint"] = "constraints"


def counterpart(layer: Any, custom: Mapping[str, Any]) -> Any:
    """What makes a layer for Keras 2: a class, or what the user gives; None if there is nothing."""
    name = type(layer).__name__
    if name in custom:
        return custom[name]
    if not _is_theirs(layer):
        return None
    if name in APPLICATIONS:
        return getattr(inspect.getmodule(APPLICATIONS[name]), name)
    return getattr(keras.layers, name, None)


def convert_layer(layer: Any, custom: Mapping[str, Any], convert: Callable[[Any], Any]) -> Any:
    """An unbuilt layer of Keras 2 that computes what one of Keras 3 does.

    Args:
        layer: the layer.
        custom: what the user gives for classes that Keras 2 lacks, by their names.
        convert: what converts a layer inside the layer.

    Raises:
        ValueError: if Keras 2 lacks it, or an option that it has.
    """
    make = counterpart(layer, custom)
    if make is None:
        raise _refusal(layer, "Keras 2 has no such class")
    if type(layer).__name__ == "Lambda" and _is_theirs(layer):
        return _lambda(layer)
    config = {key: _value(layer, key, each, convert) for key, each in _config(layer).items()}
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
        raise _refusal(layer, f"Keras 2 does not make it: {error}") from error


def _config(layer: Any) -> dict[str, Any]:
    """The configuration of a layer, with Keras 2's names and what Keras 3 leaves out of it."""
    name, config = type(layer).__name__, layer.get_config()
    if _is_theirs(layer):
        if name == "Bidirectional":
            _plain_bidirectional(config)
        if hasattr(layer, "get_vocabulary"):  # Keras 3 leaves an adapted one out.
            words = layer.get_vocabulary(include_special_tokens=False)
            config["vocabulary"] = np.asarray(words).tolist()
            del config["dtype"]
        if hasattr(layer, "output_padding"):  # Keras 3.8 leaves it out.
            config["output_padding"] = layer.output_padding
        if name == "Discretization":
            config["bin_boundaries"], config["num_bins"] = layer.bin_boundaries, None
    renamed = RENAMED.get(name, {})
    return {renamed.get(key, key): each for key, each in config.items()}


def _plain_bidirectional(config: dict[str, Any]) -> None:
    """Leaves out the backward layer if it is as the forward layer but for its direction."""
    forward, backward = (dict(config[key]["config"]) for key in ("layer", "backward_layer"))
    for each in (forward, backward):
        del each["name"], each["go_backwards"]
    if forward == backward and config["backward_layer"]["config"]["go_backwards"]:
        del config["backward_layer"]


def _value(layer: Any, key: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    """What Keras 2 takes for an entry of a configuration of Keras 3."""
    inner = getattr(layer, key, None)
    if isinstance(inner, (list, tuple)) and inner and all(map(is_layer, inner)):
        return [convert(each) for each in inner]
    if key == "layer" and type(layer).__name__ == "Bidirectional":
        inner = layer.forward_layer
    if is_layer(inner):
        return convert(inner)
    if key.endswith("activation") and callable(inner):
        found = activations.to_keras_2(inner, keras_3())
        if found is None:
            raise _refusal(layer, f"Keras 2 does not have its activation '{inner.__name__}'")
        return found
    if key == "dtype":
        return _policy(layer)
    kind = _PLURAL.get(key.rsplit("_", 1)[-1])
    if kind and isinstance(value, dict):
        return _part(layer, kind, value)
    if isinstance(value, dict) and value.get("class_name") == "__numpy__":
        return np.array(value["config"]["value"], value["config"]["dtype"])
    return value


def _policy(layer: Any) -> str:
    """The name of a layer's dtype policy."""
    policy = layer.dtype_policy
    if getattr(policy, "quantization_mode", None):
        raise _refusal(layer, f"it is quantized already, by the policy '{policy.name}'")
    return str(policy.name)


def _part(layer: Any, kind: str, value: dict[str, Any]) -> Any:
    """An initializer, regularizer or constraint. Weights are copied: any initializer will do."""
    made = getattr(getattr(keras, kind), value["class_name"], None)
    if made is None or not str(value["module"]).startswith("keras"):
        if kind == "initializers":
            return "zeros"
        raise _refusal(layer, f"Keras 2 does not have its {value['class_name']} ({kind})")
    known = _options(made)
    return made(**{key: each for key, each in value["config"].items() if key in known})


def _lambda(layer: Any) -> Any:
    """A Lambda of the same function: it computes with TensorFlow under either Keras."""
    return keras.layers.Lambda(
        layer.function,
        output_shape=layer._output_shape,
        arguments=layer.arguments,
        name=layer.name,
        dtype=layer.dtype_policy.name,
    )


def _options(made: Any) -> set[str]:
    """The names of the options that a class of Keras 2 takes."""
    found = set(_BASE)
    for base in _initialized(made):
        if base is keras.layers.Layer:
            break
        found.update(inspect.signature(vars(base)["__init__"]).parameters)
    return found


def _initialized(made: Any) -> list[Any]:
    """A class and those it inherits from, as far as they have an `__init__` of their own."""
    return [base for base in made.__mro__[:-1] if "__init__" in vars(base)]


def _is_neutral(layer: Any, key: str) -> bool:
    """Whether an option has a value that means what Keras 2 does without it."""
    value = layer.get_config()[key]
    if value is None or value in NEUTRAL.get(key, ()):
        return True
    signatures = [inspect.signature(vars(base)["__init__"]) for base in _initialized(type(layer))]
    defaults = [each.parameters[key].default for each in signatures if key in each.parameters]
    return bool(defaults) and bool(value == defaults[0])


def _is_theirs(layer: Any) -> bool:
    """Whether a layer's class is of Keras 3 itself."""
    return type(layer).__module__.split(".")[0] == "keras"


def _refusal(layer: Any, reason: str) -> ValueError:
    name = type(layer).__name__
    return ValueError(
        f"Layer '{layer.name}' ({name}) of Keras 3 cannot be converted: {reason}. Change that, or "
        f"say what to make of it: "
        f"keras_qat.from_keras_3(model, custom_objects={{'{name}': a_keras_2_layer_class}})."
    )
