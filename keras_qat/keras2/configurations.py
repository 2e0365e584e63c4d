"""Makes layers and models of Keras' configurations, with the custom classes that they name."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from keras_qat.keras2.backend import allow_any_batch_sizes, keras, swap_attributes
from keras_qat.messages import KNOWN, LIBRARIES, get_package


def applications_scope() -> Any:
    """Returns a scope that loads ConvNeXt's layers, which `keras.applications` did not register.

    Keras itself cannot load a model with them. A user's registered classes take precedence.
    """
    module = inspect.getmodule(keras.applications.ConvNeXtTiny)
    names = ("LayerScale", "StochasticDepth")
    missing = [name for name in names if keras.utils.get_registered_object(name) is None]
    classes = {name: getattr(module, name) for name in missing if hasattr(module, name)}
    return keras.utils.custom_object_scope(classes)


def _serialization() -> Any:
    return inspect.getmodule(keras.saving.deserialize_keras_object)


def get_safe_mode() -> bool | None:
    """Returns whether Keras is loading a file in safe mode; None if neither is set."""
    mode = _serialization().in_safe_mode()
    frame = inspect.currentframe() if mode is None else None
    while frame is not None:  # Of .h5 files and SavedModels Keras takes the argument to itself.
        if frame.f_code.co_name == "load_model" and "safe_mode" in frame.f_locals:
            return bool(frame.f_locals["safe_mode"])
        frame = frame.f_back
    return mode


def check_modules(config: Any) -> None:
    """Raises a `ValueError` if Keras would import a module that a configuration names.

    A module that is imported already, or a class that is registered, is accepted.
    """
    if isinstance(config, dict):
        if "class_name" in config and not _is_known(config):
            raise ValueError(
                f"The model's configuration has the class {config['class_name']!r} of the module "
                f"{config['module']!r}, which is not imported. If you trust the file, import the "
                f"module before you load it, or pass safe_mode=False."
            )
        config = config.values()
    elif not isinstance(config, (list, tuple)):
        return
    for entry in config:
        check_modules(entry)


def _is_known(config: dict[str, Any]) -> bool:
    module, name = config.get("module"), config.get("registered_name")
    if not isinstance(module, str) or module in sys.modules:
        return True
    if module.split(".")[0] in LIBRARIES:
        return True
    return isinstance(name, str) and keras.utils.get_registered_object(name) is not None


class CustomObjects(NamedTuple):
    """Custom classes and functions that Keras needs to rebuild layers from configurations.

    Args:
        classes: classes and functions by their names.
        has_lambda: whether there is a `Lambda` layer.
    """

    classes: dict[str, Any]
    has_lambda: bool


def collect_custom_objects(layers: Iterable[Any]) -> CustomObjects:
    """Collects custom classes of layers and their parts, and functions in their place.

    Not several functions of one name that regularize or constrain: one would be taken for the
    other. Values of initializers are replaced by those of the model.
    """
    layers = list(layers)
    kinds: Any = keras.initializers.Initializer, keras.regularizers.Regularizer
    kinds = (*kinds, keras.constraints.Constraint)
    values = [value for layer in layers for value in vars(layer).values()]
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in values]
    parts = [part for parts in lists for part in parts if isinstance(part, kinds)]
    custom: dict[str, Any] = {
        type(item).__name__: type(item)
        for item in [*layers, *parts]
        if get_package(type(item)) not in KNOWN
    }
    functions = [
        (name, value)
        for layer in layers
        for name, value in vars(layer).items()
        if inspect.isfunction(value)
        and get_package(value) not in KNOWN
        and not (get_package(value) == "tensorflow" and can_find_activation(value))
    ]
    of_values = [f for name, f in functions if name.endswith(("activation", "initializer"))]
    of_weights = {f for name, f in functions if name.endswith(("regularizer", "constraint"))}
    names = Counter(function.__name__ for function in of_weights)
    of_weights = {function for function in of_weights if names[function.__name__] == 1}
    custom |= {function.__name__: function for function in [*of_weights, *of_values]}
    has_lambda = any(isinstance(layer, keras.layers.Lambda) for layer in layers)
    return CustomObjects(custom, has_lambda)


def can_find_activation(function: Any) -> bool:
    """Returns whether Keras finds an activation that is TensorFlow's, or its own of that name."""
    with contextlib.suppress(ValueError):
        return callable(keras.activations.get(getattr(function, "__name__", "")))
    return False


@contextlib.contextmanager
def deserialization_scope(*customs: CustomObjects, safe: bool | None = None) -> Iterator[None]:
    """Runs a block in which Keras can make layers with custom parts from configurations.

    Custom classes need not be registered. If `customs` include a `Lambda`, Keras may make one
    here: it was allowed earlier, or never saved. Otherwise `safe` is Keras' safe mode; None leaves
    the mode as it is.
    """
    has_lambda = any(objects.has_lambda for objects in customs)
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(applications_scope())
        for objects in customs:
            scopes.enter_context(keras.utils.custom_object_scope(objects.classes))
        if has_lambda or safe is not None:
            scopes.enter_context(_serialization().SafeModeScope(safe and not has_lambda))
        yield


def find_missing_config(layer: Any) -> dict[str, Any]:
    """Returns entries that Keras omits from a layer's configuration: `synchronized`, names.

    Keras gives names only to constructors whose `**kwargs` are called just so.
    """
    if isinstance(layer, keras.layers.BatchNormalization):
        return {"synchronized": True} if getattr(layer, "synchronized", False) else {}
    if not getattr(layer, "_auto_get_config", False) or "name" in layer.get_config():
        return {}
    takes_any = inspect.getfullargspec(type(layer).__init__).varkw is not None
    return {"name": layer.name, "trainable": layer.trainable} if takes_any else {}


def serialize(layer: Any) -> dict[str, Any]:
    """Serializes a layer, with the entries that Keras omits."""
    serialized = keras.layers.serialize(layer)
    serialized["config"].update(find_missing_config(layer))
    return serialized


@contextlib.contextmanager
def _own_format() -> Iterator[None]:
    """Runs a block in which Keras reads configurations as `serialize` writes them.

    While it loads an .h5 file it expects the format of such files, with which it does not know
    registered classes by their names.
    """
    with swap_attributes(_serialization(), in_tf_saved_model_scope=lambda: False):
        yield


def deserialize(config: dict[str, Any]) -> Any:
    """Makes a layer of what `serialize` returned."""
    with _own_format() if "module" in config else contextlib.nullcontext():
        return keras.layers.deserialize(config)


def load_nested_model(config: dict[str, Any]) -> Any:
    """Makes a model of its configuration, inside of a layer's."""
    with _own_format(), allow_any_batch_sizes():
        return keras.Model.from_config(config)
