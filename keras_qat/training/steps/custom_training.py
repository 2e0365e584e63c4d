"""Lets quantization-aware models inherit custom training from the class of the float model.

A user's subclass of `keras.Model` may define methods such as `train_step`. The quantization-aware
model then gets a class that derives from the user's class. It also gets the attributes of the float
model, which the methods may read.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Graph
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.keras2.readability import defines
from keras_qat.keras2.safe_loading import safe_scope
from keras_qat.messages import LIBRARIES, get_package

PREDICTION = ("predict", "predict_step", "make_predict_function")
"""Methods that change the result of `predict` if a class overrides them."""

METHODS = (
    *("fit", "train_step", "make_train_function", "compile", "compute_loss", "compute_metrics"),
    *("evaluate", "test_step", "make_test_function", *PREDICTION),
)
"""Methods that change training, evaluation or prediction if a class overrides them."""

HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
"""Methods of a callback that Keras calls between training steps."""

ASYNCHRONOUS = (
    tf.distribute.experimental.ParameterServerStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)
"""Strategies with several workers. Each of them may change the step counters of the layers."""

DATA = (np.ndarray, tf.Tensor, tf.data.Dataset, tf.distribute.DistributedDataset)
"""Types of training data that do not run a user's code between training steps."""


def is_undisturbed(model: keras.Model, x: Any, callbacks: Iterable[Any]) -> bool:
    """Returns True if no code of the user can run between the training steps of an epoch."""
    hooks = [getattr(item, hook, item) for item in callbacks for hook in HOOKS]
    arrays = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else (x,)
    return (
        all(get_package(base) in LIBRARIES for base in type(model).__mro__)
        and not vars(model).keys() & {*METHODS, "reset_metrics"}
        and not model.run_eagerly
        and not model.autotune_steps_per_execution
        and not isinstance(model.distribute_strategy, ASYNCHRONOUS)
        and all(get_package(hook) in LIBRARIES for hook in hooks)
        and all(isinstance(array, DATA) for array in arrays)
    )


def trains_itself(model: keras.Model) -> bool:
    """Returns True if a model's class overrides methods for training, evaluation or prediction."""
    return defines(type(model), *METHODS)


def take_training(model: keras.Model, original: keras.Model, without: Iterable[str]) -> None:
    """Makes a functional model train like `original`.

    The model gets a new class, which derives from the classes of `model` and `original`. The
    attributes of `original` are copied to the model.

    Args:
        model: the model to change.
        original: a model with custom training.
        without: names of attributes that are not copied.
    """
    left_out = dict.fromkeys(without, type(original).__name__)
    derive: Any = derive_class  # Classes are hashable, which mypy does not know.
    model.__class__ = derive(type(model), type(original))
    object.__setattr__(model, "left_out", left_out)
    for name, value in vars(original).items():
        if name in _set_by_keras() or name in left_out:
            continue
        if inspect.ismethod(value) and value.__self__ is original:
            value = types.MethodType(value.__func__, model)
        setattr(model, name, value)


def find_weight_attributes(original: keras.Model, graph: Graph) -> list[str]:
    """Returns the names of attributes of `original`, such as layers, that hold weights of `graph`.

    The quantized model has copies of these weights, and must not train the original weights.
    """
    layers = {
        layer for call in graph.calls for layer in (call.layer, call.source, *call.within) if layer
    }
    own = [w for layer in layers for w in layer._trainable_weights + layer._non_trainable_weights]
    sources = [*own, *(w for weights in graph.weights.values() for w in weights)]
    inside = {id(weight) for weight in sources}

    def holds_weight(value: object) -> bool:
        items = tf.nest.flatten(value)
        weights = [w for item in items for layer in list_layers(item) for w in layer.weights]
        return any(id(weight) in inside for weight in [*items, *weights])

    names = [name for name in vars(original) if name not in _set_by_keras()]
    return [name for name in names if holds_weight(vars(original)[name])]


def get_class_config(model: keras.Model) -> dict[str, Any] | None:
    """Returns a configuration for `from_class_config`, or None if Keras cannot save the model.

    The entry `config` is None if the constructor is `keras.Model(inputs, outputs)`.
    """
    model_class, config = type(model), None
    if defines(model_class, "__init__", "get_config"):
        try:
            config = keras.saving.serialize_keras_object(model)["config"]
        except (TypeError, ValueError, NotImplementedError, AttributeError):
            return None
    return {
        "module": model_class.__module__,
        "class_name": model_class.__name__,
        "registered_name": keras.utils.get_registered_name(model_class),
        "config": config,
    }


def from_class_config(config: dict[str, Any], custom_objects: Any = None) -> Any:
    """Creates a model from a configuration by `get_class_config`.

    Raises:
        ValueError: if the class is unknown, or cannot create a model from the configuration.
    """
    name, registered_name = config["class_name"], config["registered_name"]
    registered = keras.utils.get_registered_object(registered_name, custom_objects)
    if registered is not None:  # The file's format decides which name Keras looks up.
        custom_objects = {**(custom_objects or {}), name: registered, registered_name: registered}
    try:
        with safe_scope(config, custom_objects):
            return keras.saving.deserialize_keras_object(deepcopy(config), custom_objects)
    except Exception as error:  # A user's class may raise any error.
        raise ValueError(str(error)) from error


@functools.cache
def _set_by_keras() -> frozenset[str]:
    """Return the names of the attributes that Keras sets on every compiled model."""
    tensor = keras.Input((1,))
    model = keras.Model(tensor, keras.layers.Activation("linear")(tensor))
    model.compile("sgd")
    return frozenset(vars(model))


@functools.cache
def derive_class(base: type, user_class: type) -> type:
    """Returns a class that derives from both classes. Saved files contain the name of `base`."""
    methods: dict[str, Any] = {"class_before": base}
    if issubclass(user_class, keras.Sequential):  # The model is functional nevertheless.
        names = [name for name in vars(keras.Sequential) if not defines(user_class, name)]
        inherited = {name: inspect.getattr_static(base, name, None) for name in names}
        kinds = (types.FunctionType, property)
        methods |= {name: value for name, value in inherited.items() if isinstance(value, kinds)}
    return type(base.__name__, (base, user_class), {"__module__": base.__module__, **methods})
