"""Names of the layers in a user's own layer that are the same in every copy of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from keras_qat.keras2.backend import keras, swap_attributes
from keras_qat.messages import KERAS, get_package


def names_inside(layer: Any) -> dict[int, str]:
    """Names the layers in a layer's attributes; returns id of a layer -> name.

    Layers that Keras named are named after their attribute, as Keras numbers them differently in
    every copy. Names that a user gave stay.
    """
    names: dict[int, str] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, keras.layers.Layer):
            names.setdefault(id(value), path if _is_made_up(value) else value.name)
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}_{key}")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                visit(item, f"{path}_{index}")

    for name, value in vars(layer).items():
        if not name.startswith(("_self_", "_obj", "_inbound", "_outbound")):
            visit(value, name.strip("_"))
    return names


def name_inner_calls(layer: Any) -> dict[int, str]:
    """Names the layers inside a layer as `names_inside`, and those of models among them by class.

    The latter need not be different.
    """
    names = names_inside(layer)
    for model in layer._flatten_layers(include_self=False):
        if isinstance(model, keras.Model) and id(model) in names:
            for inner in model._flatten_layers(recursive=False, include_self=False):
                name = _name_of_class(inner) if _is_made_up(inner) else inner.name
                names.setdefault(id(inner), f"{names[id(model)]}/{name}")
    return names


def _is_made_up(layer: Any) -> bool:
    """Returns whether a layer's name is one that Keras made."""
    return bool(re.fullmatch(re.escape(_name_of_class(layer)) + r"(_\d+)?", layer.name))


def _name_of_class(layer: Any) -> str:
    parted = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", type(layer).__name__)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", parted).lower()


def is_of_keras(layer: Any) -> bool:
    """Returns whether the class of a layer is Keras' own."""
    return get_package(type(layer)) in KERAS


@contextlib.contextmanager
def use_attribute_names(layer: Any) -> Iterator[None]:
    """Runs a block in which a user's own layers, and layers in them, are named after attributes.

    The names that Keras gives differ in every copy, as a counter of the process is part of them.
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
def use_unique_names(layer: Any) -> Iterator[None]:
    """Runs a block in which no two layers inside a layer have one name, as a Keras model requires.

    Keras counts anew in `build`, so that a layer made there may be named as one made before.
    """
    taken = set[str]()
    with contextlib.ExitStack() as stack:
        for inner in layer._flatten_layers(include_self=False):
            name, count = inner.name, 1
            while name in taken:
                name, count = f"{inner.name}_{count}", count + 1
            taken.add(name)
            stack.enter_context(swap_attributes(inner, _name=name))
        yield
