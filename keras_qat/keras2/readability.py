"""Checks that the layers of a model are known, explains errors, and wraps subclassed models."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.messages import LIBRARIES, get_package

_Model = keras.Model

_REVIVED = {"RevivedLayer", "RevivedNetwork"}
"""Keras' classes for layers that were loaded from a SavedModel without Python code."""


def check_readable(model: Any) -> None:
    """Raises a `ValueError` if the computation of a model is unknown.

    For example, a Sequential model without an input shape is refused.
    """
    kind = type(model).__name__
    if not isinstance(model, _Model):
        raise ValueError(_describe_other_object(model, kind))
    _check_has_code(model)
    _check_vocabularies(model)
    if is_graph_model(model):
        return
    if isinstance(model, keras.Sequential):
        raise ValueError(
            f"The Sequential model '{model.name}' has no input shape yet. Put keras.Input(shape) "
            f"first in it, or call model.build((None, ...)) with its input shape."
        )
    if not defines(type(model), "call"):
        raise ValueError(
            f"{kind} '{model.name}' has no call method, so it computes nothing itself. Quantize "
            f"the models that it trains, and build a {kind} from the results."
        )
    raise ValueError(
        f"{kind} '{model.name}' is a subclassed model, and its inputs are not known: call it on "
        f"data once, or quantize_model(model, inputs=keras.Input(shape))."
    )


def _describe_other_object(model: Any, kind: str) -> str:
    expected = "Expected a Keras model, got"
    packages = set(map(get_package, type(model).__mro__))
    if "keras" in packages and not isinstance(model, keras.layers.Layer):
        return (
            f"{kind} belongs to Keras 3, but Keras 2 is needed here. Convert a model with "
            f"keras_qat.from_keras_3, or build it with the package tf_keras."
        )
    if isinstance(model, type):
        return f"{expected} the class {model.__name__}: pass an instance of it."
    if hasattr(model, "get_layer"):
        return (
            f"'{model.name}' was built with a different Keras package. keras_qat uses "
            f"{keras.__name__} here: build the model with keras_qat.keras."
        )
    if isinstance(model, (str, os.PathLike)) and str(model).endswith((".tflite", ".onnx")):
        return (
            f"{expected} the file {str(model)!r}, which cannot be turned into one. Arguments come "
            f"in the order model, file, data."
        )
    if isinstance(model, (str, os.PathLike)):
        return (
            f"{expected} {kind} {str(model)!r}. Load it first: "
            f"keras.models.load_model({str(model)!r})."
        )
    if isinstance(model, (list, tuple)) and any(isinstance(item, _Model) for item in model):
        return f"{expected} a {kind} of models. Pass one model per call."
    if isinstance(model, (bytes, list, tuple, dict, np.ndarray, tf.data.Dataset)):
        return f"{expected} {kind}: arguments come in the order model, file, data."
    if inspect.isfunction(model):
        return f"{expected} the function {model.__name__}: pass its result."
    if hasattr(model, "signatures"):
        return (
            f"{expected} {kind}, as tf.saved_model.load returns. Load it as a Keras model, which "
            f"knows its layers: keras.models.load_model(path)."
        )
    return (
        f"{expected} {kind}. Pass a tf_keras Sequential or functional model; a single layer goes "
        f"into keras.Sequential([keras.Input(shape), layer])."
    )


def _check_has_code(model: keras.Model) -> None:
    """Raise a `ValueError` if a SavedModel was loaded without the code of a layer.

    Keras then runs a saved TensorFlow graph. The operations of this graph cannot be read.
    """
    revived = [
        layer
        for layer in model._flatten_layers()
        if _REVIVED.intersection(base.__name__ for base in type(layer).__mro__)
    ]
    if not revived:
        return
    # Keras also revives a Keras layer if an activation or an inner layer is unknown.
    classes = [type(layer).__name__ for layer in revived]
    names = [name for name in classes if not hasattr(keras.layers, name)]
    names += [str(layer.get_config().get("activation", "name")) for layer in revived]
    raise ValueError(
        f"'{revived[0].name}' ({classes[0]}) of '{model.name}' was loaded from a SavedModel "
        f"without its code, because Keras did not find {names[0]!r}. Pass all custom code: "
        f"keras.models.load_model(path, custom_objects={{{names[0]!r}: {names[0]}}})."
    )


def _check_vocabularies(model: keras.Model) -> None:
    """Raise a `ValueError` if a layer, such as TextVectorization, has an adapted vocabulary."""
    # An uncalled subclassed model has no weights, and raises.
    layers = [layer for layer in model._flatten_layers() if layer.built]
    if holders := [x for x in layers if not all(hasattr(w, "dtype") for w in x.weights)]:
        layer = holders[-1]  # The last is the innermost layer.
        raise ValueError(
            f"'{layer.name}' of '{model.name}' holds a vocabulary, and TFLite has no operation for "
            f"{type(layer).__name__}. Move it to the input pipeline, and quantize the rest of "
            f"the model."
        )


def is_graph_model(layer: object) -> bool:
    """Returns True if an object is a functional model, or a Sequential model with an input."""
    is_graph = isinstance(layer, _Model) and bool(getattr(layer, "_is_graph_network", False))
    return is_graph and not defines(type(layer), "call")


def is_subclassed(model: object) -> bool:
    is_unread = isinstance(model, _Model) and not is_graph_model(model)
    return is_unread and not isinstance(model, keras.Sequential)


def as_functional(model: Any, inputs: Any = None) -> Any:
    """Wraps a subclassed model as the only layer of a functional model.

    Args:
        model: any model. A model that is not subclassed is returned unchanged.
        inputs: symbolic inputs in the structure that the model accepts. By default, they have the
            shapes from an earlier call of the model, or from `model.build`.

    Raises:
        ValueError: if no inputs are known, or if the model is not subclassed but `inputs` is given.
    """
    if not is_subclassed(model):
        if inputs is not None:
            raise ValueError(
                f"'{model.name}' has inputs already: pass inputs= only for subclassed models."
            )
        return model
    if inputs is None:
        try:
            args, _ = model.save_spec()
        except (TypeError, ValueError):  # It was never called.
            args = ()
        sizes = model._build_input_shape
        is_one = isinstance(sizes, tuple) and all(n is None or isinstance(n, int) for n in sizes)
        if not args and is_one:
            args = (tf.TensorSpec(sizes, keras.backend.floatx()),)
        if not args:
            check_readable(model)
        inputs = tf.nest.map_structure(lambda spec: keras.Input(type_spec=spec), args[0])
    try:
        return _Model(inputs, model(inputs), name=f"{model.name}_functional")
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} '{model.name}' cannot be called on symbolic tensors: {error}"
        ) from error


def defines(model_class: type, *names: str) -> bool:
    """Returns True if users' code, not Keras, defines any of the methods `names` of a model."""
    owners = (next(c for c in model_class.__mro__ if name in vars(c)) for name in names)
    return any(get_package(owner) not in LIBRARIES for owner in owners)


def describe_error(error: Exception) -> str:
    """Describes an error, and the line of custom code that raised the error."""
    foreign = ("site-packages", str(Path(__file__).parent.parent), "<", "__autograph_generated")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(text in frame.filename for text in foreign)]
    location = f" in `{own[-1].line}` (line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{location}: {get_first_line(error)}"


@contextlib.contextmanager
def explain_config_errors(config: Any, custom_objects: Any = None) -> Iterator[None]:
    """Explains errors in a `with` block that creates a model from a configuration.

    Raises:
        ValueError: if a class is not registered, or if entries are missing or wrong.
    """
    try:
        yield
    except (TypeError, LookupError, AttributeError, tf.errors.InvalidArgumentError) as error:
        for name in {*_list_unregistered(config)} - {*(custom_objects or {})}:
            raise ValueError(
                f"The model has a layer of the class {name}, which is not registered. Load the "
                f"model with custom_objects={{'{name}': {name}}}, or decorate the class with "
                f"@keras.saving.register_keras_serializable()."
            ) from error
        if "Could not locate" in str(error):
            raise
        classes = re.findall(r"deserializing class '(\w+)'", str(error))
        cause = get_first_line(ValueError(str(error).rsplit("Exception encountered: ", 1)[-1]))
        raise ValueError(
            f"The model's configuration is damaged or was changed: {type(error).__name__}, "
            f"{cause.rstrip('.')}. Save the model again. If it has custom layers, "
            f"check that the from_config of {classes[-1] if classes else 'each'} accepts the "
            f"result of its get_config."
        ) from error


def _list_unregistered(config: Any) -> list[str]:
    if isinstance(config, (list, tuple)):
        return [name for item in config for name in _list_unregistered(item)]
    if not isinstance(config, dict):
        return []
    name, found = config.get("registered_name"), _list_unregistered([*config.values()])
    is_custom = name is not None and name == config.get("class_name")
    if is_custom and keras.utils.get_registered_object(name) is None:
        found.append(str(name))
    return found


def get_first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if len(text) < 120 else text[:117] + "..."
