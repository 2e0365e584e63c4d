"""Names of inner layers of a custom layer that are equal in every copy of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from keras_qat.keras2.backend import keras, swap_attributes
from keras_qat.messages import KERAS, get_package


def name_inner_calls(layer: keras.layers.Layer) -> dict[int, str]:
    """Returns a name for each inner layer by its id.

    Layers with an automatic name are named after their attribute, and layers of inner models after
    their class, because Keras numbers them differently in every copy. Names that a user chose stay.
    The names in inner models need not be unique.
    """
    names: dict[int, str] = {}

    def visit(value: object, path: str) -> None:
        if isinstance(value, keras.layers.Layer):
            names.setdefault(id(value), path if _has_automatic_name(value) else value.name)
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}_{key}")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                visit(item, f"{path}_{index}")

    for name, value in vars(layer).items():
        if not name.startswith(("_self_", "_obj", "_inbound", "_outbound")):
            visit(value, name.strip("_"))
    for model in layer._flatten_layers(include_self=False):
        if isinstance(model, keras.Model) and id(model) in names:
            for inner in model._flatten_layers(recursive=False, include_self=False):
                name = _name_class(inner) if _has_automatic_name(inner) else inner.name
                names.setdefault(id(inner), f"{names[id(model)]}/{name}")
    return names


def _has_automatic_name(layer: keras.layers.Layer) -> bool:
    return bool(re.fullmatch(re.escape(_name_class(layer)) + r"(_\d+)?", layer.name))


def _name_class(layer: keras.layers.Layer) -> str:
    words = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", type(layer).__name__)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def is_of_keras(layer: object) -> bool:
    """Returns whether the class of a layer belongs to Keras."""
    return get_package(type(layer)) in KERAS


@contextlib.contextmanager
def use_attribute_names(layer: keras.layers.Layer) -> Iterator[None]:
    """Names custom layers, and layers inside them, after attributes inside a `with` block.

    The names that Keras assigns differ in every copy, because they include a global counter.
    """
    with contextlib.ExitStack() as stack:
        names = name_inner_calls(layer)
        for inner in layer._flatten_layers(include_self=False):
            if id(inner) in names and not (is_of_keras(layer) and is_of_keras(inner)):
                name = names[id(inner)].rsplit("/", 1)[-1]
                stack.enter_context(swap_attributes(inner, _name=name))
                stack.enter_context(use_attribute_names(inner))
        yield


@contextlib.contextmanager
def use_unique_names(layer: keras.layers.Layer) -> Iterator[None]:
    """Gives all layers inside a layer different names inside a `with` block.

    A Keras model requires that. In `build`, Keras' counter starts again, so layers created there
    may repeat earlier names.
    """
    used = set[str]()
    with contextlib.ExitStack() as stack:
        for inner in layer._flatten_layers(include_self=False):
            name, count = inner.name, 1
            while name in used:
                name, count = f"{inner.name}_{count}", count + 1
            used.add(name)
            stack.enter_context(swap_attributes(inner, _name=name))
        yield
