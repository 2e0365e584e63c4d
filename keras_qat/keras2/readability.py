"""Checks which models can be read, and makes subclassed models readable."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.messages import LIBRARIES, get_package

_Model = keras.Model

_REVIVED = {"RevivedLayer", "RevivedNetwork"}
"""Keras' classes of layers that run a SavedModel's graph in place of unknown code."""


def check_readable(model: Any) -> None:
    """Raises a `ValueError` that says what to do if a model cannot be read."""
    roots = set(map(get_package, type(model).__mro__))
    if "keras" in roots and not isinstance(model, keras.layers.Layer):
        raise ValueError(
            f"{type(model).__name__} belongs to Keras 3, but Keras 2 is needed here. Convert a "
            f"model with keras_qat.from_keras_3, or build it with the package tf_keras."
        )
    if isinstance(model, type):
        raise ValueError(
            f"Expected a Keras model, got the class {model.__name__}: pass an instance of it."
        )
    if not isinstance(model, _Model) and hasattr(model, "get_layer"):
        raise ValueError(
            f"'{model.name}' was built with a different Keras package. keras_qat uses "
            f"{keras.__name__} here: build the model with keras_qat.keras."
        )
    if isinstance(model, (str, os.PathLike)) and str(model).endswith((".tflite", ".onnx")):
        raise ValueError(
            f"Expected a Keras model, got the file {str(model)!r}, which cannot be turned into "
            f"one. Arguments come in the order model, file, data."
        )
    if isinstance(model, (str, os.PathLike)):
        raise ValueError(
            f"Expected a Keras model, got {type(model).__name__} {str(model)!r}. Load it first: "
            f"keras.models.load_model({str(model)!r})."
        )
    if isinstance(model, (list, tuple)) and any(isinstance(item, _Model) for item in model):
        raise ValueError(
            f"Expected a Keras model, got a {type(model).__name__} of models: pass each by itself."
        )
    if isinstance(model, (bytes, list, tuple, dict, np.ndarray, tf.data.Dataset)):
        raise ValueError(
            f"Expected a Keras model, got {type(model).__name__}: arguments come in the order "
            f"model, file, data."
        )
    if inspect.isfunction(model):
        raise ValueError(
            f"Expected a Keras model, got the function {model.__name__}: pass what it returns."
        )
    if not isinstance(model, _Model) and hasattr(model, "signatures"):
        raise ValueError(
            f"Expected a Keras model, got {type(model).__name__}, as tf.saved_model.load returns. "
            f"Load it as a Keras model, which knows its layers: keras.models.load_model(path)."
        )
    if not isinstance(model, _Model):
        raise ValueError(
            f"Expected a Keras model, got {type(model).__name__}. Pass a tf_keras Sequential or "
            f"functional model; a single layer goes into keras.Sequential([keras.Input(shape), "
            f"layer])."
        )
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
            f"{type(model).__name__} '{model.name}' computes nothing itself, as it has no call. "
            f"Quantize the models that it trains, and make a {type(model).__name__} of what "
            f"quantize_model returns."
        )
    raise ValueError(
        f"{type(model).__name__} '{model.name}' is a subclassed model, and its inputs are not "
        f"known: call it on data once, or quantize_model(model, inputs=keras.Input(shape))."
    )


def _check_has_code(model: Any) -> None:
    """Raises a `ValueError` if a SavedModel was loaded without the code of a layer.

    Keras then runs TensorFlow's saved graph in the layer's place, which has no operations to read.
    """
    revived = [
        layer
        for layer in model._flatten_layers()
        if _REVIVED.intersection(base.__name__ for base in type(layer).__mro__)
    ]
    if not revived:
        return
    # A layer of Keras is revived if it does not know its activation, or a layer inside of it.
    classes = [type(layer).__name__ for layer in revived]
    names = [name for name in classes if not hasattr(keras.layers, name)]
    names += [str(layer.get_config().get("activation", "name")) for layer in revived]
    raise ValueError(
        f"'{revived[0].name}' ({classes[0]}) of '{model.name}' was loaded from a SavedModel "
        f"without its code, as Keras did not find {names[0]!r}. Pass all custom code: "
        f"keras.models.load_model(path, custom_objects={{{names[0]!r}: {names[0]}}})."
    )


def _check_vocabularies(model: Any) -> None:
    """Raises a `ValueError` if a layer has adapted to a vocabulary, which is no variable."""
    # A subclassed model that was not called yet raises if it is asked for weights.
    layers = [layer for layer in model._flatten_layers() if layer.built]
    if holders := [x for x in layers if not all(hasattr(w, "dtype") for w in x.weights)]:
        layer = holders[-1]  # The innermost one.
        raise ValueError(
            f"'{layer.name}' of '{model.name}' holds a vocabulary, and TFLite has no operation for "
            f"{type(layer).__name__}. Compute it before the model, in the input pipeline, and "
            f"quantize the model after it."
        )


def is_graph_model(layer: Any) -> bool:
    """Returns whether a layer is a model that can be read: its layers say what it computes."""
    is_graph = isinstance(layer, _Model) and bool(getattr(layer, "_is_graph_network", False))
    return is_graph and not defines(type(layer), "call")


def is_subclassed(model: Any) -> bool:
    """Returns whether a model defines what it computes in its `call` alone."""
    unread = isinstance(model, _Model) and not is_graph_model(model)
    return unread and not isinstance(model, keras.Sequential)


def as_functional(model: Any, inputs: Any = None) -> Any:
    """Wraps a subclassed model as the only layer of a functional one, to be opened later.

    Args:
        model: any model; models of other kinds are returned as they are.
        inputs: symbolic inputs in the structure that the model takes; by default like the tensors
            of its last call, or of the shape that it was built with.

    Raises:
        ValueError: if no inputs are known, or `inputs` are given for a model of another kind.
    """
    if not is_subclassed(model):
        if inputs is not None:
            raise ValueError(f"'{model.name}' knows its inputs: inputs= is for subclassed models.")
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
    """Returns whether a class of a user is the first one to define one of some names."""
    owners = (next(c for c in model_class.__mro__ if name in vars(c)) for name in names)
    return any(get_package(owner) not in LIBRARIES for owner in owners)
