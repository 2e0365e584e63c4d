"""Creates layers and models of Keras and of custom classes from configurations."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from keras_qat.keras2.backend import allow_any_batch_sizes, keras, swap_attributes
from keras_qat.keras2.safe_loading import serialization
from keras_qat.messages import KNOWN, get_package


def applications_scope() -> contextlib.AbstractContextManager[Any]:
    """Returns a scope in which Keras can load a saved ConvNeXt.

    `keras.applications` does not register ConvNeXt's layers. A user's registered classes have
    priority.
    """
    module = inspect.getmodule(keras.applications.ConvNeXtTiny)
    names = ("LayerScale", "StochasticDepth")
    missing = [name for name in names if keras.utils.get_registered_object(name) is None]
    classes = {name: getattr(module, name) for name in missing if hasattr(module, name)}
    return keras.utils.custom_object_scope(classes)


class CustomObjects(NamedTuple):
    """Custom classes and functions that Keras needs to create layers from configurations.

    Args:
        classes: maps names to classes and functions.
        has_lambda: True if there is a `Lambda` layer.
    """

    classes: dict[str, Any]
    has_lambda: bool


def collect_custom_objects(layers: Iterable[keras.layers.Layer]) -> CustomObjects:
    """Collects the custom classes and functions of layers, initializers and similar objects.

    Keras finds functions by name. If regularizers or constraints have the same name, they are
    omitted. Initializers may have the same name, because initial weights are overwritten later.
    """
    layers = list(layers)
    kinds: Any = keras.initializers.Initializer, keras.regularizers.Regularizer
    kinds = (*kinds, keras.constraints.Constraint)
    attributes = [(name, value) for layer in layers for name, value in vars(layer).items()]
    lists = [x if isinstance(x, (list, tuple)) else [x] for _, x in attributes]
    objects = [x for items in lists for x in items if isinstance(x, kinds)]
    custom: dict[str, Any] = {
        type(item).__name__: type(item)
        for item in [*layers, *objects]
        if get_package(type(item)) not in KNOWN
    }
    functions = [
        (name, value)
        for name, value in attributes
        if inspect.isfunction(value)
        and get_package(value) not in KNOWN
        and not (get_package(value) == "tensorflow" and can_find_activation(value))
    ]
    of_values = [f for name, f in functions if name.endswith(("activation", "initializer"))]
    of_weights = {f for name, f in functions if name.endswith(("regularizer", "constraint"))}
    names = Counter(function.__name__ for function in of_weights)
    unique = [function for function in of_weights if names[function.__name__] == 1]
    custom |= {function.__name__: function for function in [*unique, *of_values]}
    has_lambda = any(isinstance(layer, keras.layers.Lambda) for layer in layers)
    return CustomObjects(custom, has_lambda)


def can_find_activation(function: Callable[..., Any]) -> bool:
    """Returns True if Keras finds an activation function by its name."""
    with contextlib.suppress(ValueError):
        return callable(keras.activations.get(getattr(function, "__name__", "")))
    return False


@contextlib.contextmanager
def deserialization_scope(*customs: CustomObjects, safe: bool | None = None) -> Iterator[None]:
    """Lets Keras deserialize layers with custom objects inside a `with` block.

    Custom classes need not be registered.

    Args:
        customs: custom objects. Safe mode is off if they include a `Lambda`. Callers only pass a
            `Lambda` that is not from a file, or that the user has allowed.
        safe: Keras' safe mode if there is no `Lambda`. None leaves the mode unchanged.
    """
    has_lambda = any(objects.has_lambda for objects in customs)
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(applications_scope())
        for objects in customs:
            scopes.enter_context(keras.utils.custom_object_scope(objects.classes))
        if has_lambda or safe is not None:
            scopes.enter_context(serialization.SafeModeScope(safe and not has_lambda))
        yield


def find_missing_config(layer: keras.layers.Layer) -> dict[str, Any]:
    """Returns entries that Keras omits from a configuration: `synchronized`, `name`, `trainable`.

    `name` and `trainable` are returned only if the constructor of the layer accepts `**kwargs`.
    """
    if isinstance(layer, keras.layers.BatchNormalization):
        return {"synchronized": True} if getattr(layer, "synchronized", False) else {}
    if not getattr(layer, "_auto_get_config", False) or "name" in layer.get_config():
        return {}
    accepts_any = inspect.getfullargspec(type(layer).__init__).varkw is not None
    return {"name": layer.name, "trainable": layer.trainable} if accepts_any else {}


def serialize(layer: keras.layers.Layer) -> dict[str, Any]:
    """Serializes a layer, including the result of `find_missing_config`."""
    serialized = keras.layers.serialize(layer)
    serialized["config"].update(find_missing_config(layer))
    return serialized


@contextlib.contextmanager
def _use_current_format() -> Iterator[None]:
    """Make Keras read configurations in the format of `serialize` inside a `with` block.

    While Keras loads an .h5 file, it expects an older format. That format has no names of
    registered classes.
    """
    with swap_attributes(serialization, in_tf_saved_model_scope=lambda: False):
        yield


def deserialize(config: dict[str, Any]) -> keras.layers.Layer:
    with _use_current_format() if "module" in config else contextlib.nullcontext():
        return keras.layers.deserialize(config)


def load_nested_model(config: dict[str, Any]) -> keras.Model:
    """Creates a model from a configuration that is part of a layer's configuration."""
    with _use_current_format(), allow_any_batch_sizes():
        return keras.Model.from_config(config)
