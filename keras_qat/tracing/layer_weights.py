"""A layer's own weights: the attributes that hold them, and what its `call` assigns to them."""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import is_symbolic, keras, make_input, patch_members
from keras_qat.messages import LIBRARIES, get_package
from keras_qat.tracing.concrete_sizes import HELD, asked_by_user

_TRACKED = ("_trainable_weights", "_non_trainable_weights", "_self_", "_captured", "_obj_ref")
"""Prefixes of attributes in which Keras tracks other attributes."""

HIDES = -100.0
"""What masks in variables add to hidden scores is this or less."""

_NO_OBJECTS = (type, FunctionType, ModuleType, tf.Variable, keras.layers.Layer)


def weight_attributes(layer: Any) -> dict[str, Any]:
    """Returns a layer's own attributes that are variables, or structures with variables."""

    def has_variables(value: Any) -> bool:
        items = value.values() if isinstance(value, dict) else value
        is_nest = isinstance(value, (list, tuple, dict))
        return isinstance(value, tf.Variable) or (is_nest and any(map(has_variables, items)))

    return {
        name: value
        for name, value in vars(layer).items()
        if not name.startswith(_TRACKED) and has_variables(value)
    }


def find_weight_holders(layer: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Returns a layer and the objects in its attributes that are no layers, each with its weights.

    Such are instances of a user's own classes, as of `tf.Module`. Keras does not train the
    variables of others.
    """
    held: list[tuple[Any, dict[str, Any]]] = []
    seen = set[int]()

    def visit(value: Any) -> None:
        if isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                visit(item)
        elif value is layer or (id(value) not in seen and _is_plain_object(value)):
            seen.add(id(value))
            if own := weight_attributes(value):
                held.append((value, own))
            for name, item in list(vars(value).items()):
                if not name.startswith(_TRACKED):
                    visit(item)

    visit(layer)
    return held


def _is_plain_object(value: Any) -> bool:
    kind = type(value)
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS)
    return has_attributes and get_package(kind) not in LIBRARIES


def symbol_of_weight(variable: Any) -> Any:
    """Returns a symbol that can be asked for its value, as the variable in whose place it is.

    What a flag or a counter holds that does not train, Python reads as a number.
    """
    symbol = make_input(variable.shape, variable.dtype)
    if not (variable.trainable or variable.dtype.is_floating or variable.dtype.is_complex):
        vars(symbol)[HELD] = variable.numpy()
    symbol.value = symbol.read_value = lambda: symbol
    return symbol


def is_constant_mask(variable: Any) -> bool:
    """Returns whether a variable that does not train says what to leave out, as masks of windows.

    It holds truth values, zeros and ones, or large negative numbers, and counts as a constant.
    """
    kind, size = variable.dtype, variable.shape.num_elements()
    if variable.trainable or not size or size < 2 or kind.is_complex:
        return False
    if not (kind.is_floating or kind.is_integer):
        return kind == tf.bool
    numbers = variable.numpy()
    if numbers.min() >= 0:
        return bool(numbers.min() == 0 and numbers.any() and np.isin(numbers, (0, 1)).all())
    hidden = numbers <= HIDES
    return hidden.any() and not hidden.all() and np.abs(numbers[~hidden]).max() <= -HIDES / 10


def make_stand_in(variable: Any) -> Any:
    """Returns what code reads instead of a variable: a mask's numbers, or a symbol."""
    return (
        tf.constant(variable.numpy()) if is_constant_mask(variable) else symbol_of_weight(variable)
    )


def hash_constant_masks(model: Any) -> list[int]:
    """Returns a checksum of each mask among a model's variables."""
    return [
        zlib.crc32(weight.numpy().tobytes()) for weight in model.weights if is_constant_mask(weight)
    ]


def with_symbols(value: Any, symbols: dict[int, Any]) -> Any:
    """Returns a structure with symbols in the place of its variables."""
    if isinstance(value, dict):
        return {key: with_symbols(item, symbols) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_symbols(item, symbols) for item in value]
    return symbols.get(id(value), value)


@contextlib.contextmanager
def listed_as_symbols(symbols: dict[int, Any]) -> Iterator[None]:
    """Runs a block in which a user's code finds symbols in `layer.weights` and the like.

    Args:
        symbols: id of a variable -> the symbol in its place.
    """

    def listed(before: Any) -> property:
        def weights(layer: Any) -> Any:
            listed = before.fget(layer)
            return with_symbols(listed, symbols) if asked_by_user() else listed

        return property(weights, before.fset)

    kinds = keras.Model, keras.Sequential, keras.layers.Layer
    names = [f"{kind}{name}" for kind in ("", "trainable_") for name in ("weights", "variables")]
    with contextlib.ExitStack() as block:
        for kind in kinds:
            lists = {name: listed(vars(kind)[name]) for name in names if name in vars(kind)}
            block.enter_context(patch_members(kind, **lists))
        yield


def let_assign(
    layer: Any, attributes: dict[str, Any], symbols: dict[int, Any], assigned: dict[int, Any]
) -> None:
    """Lets `layer.kernel.assign(x)` put x in the place of a symbol, while the layer has symbols.

    Args:
        layer: the layer.
        attributes: its `weight_attributes`.
        symbols: id of a variable -> the symbol in its place.
        assigned: is filled: id of a variable -> what was assigned to it last.
    """

    def assigns(name: str, variable: Any) -> Callable[..., Any]:
        def assign(value: Any, *args: Any, **kwargs: Any) -> Any:
            assigned[id(variable)] = vars(layer)[name] = value
            value.assign = assign
            return value

        return assign

    for name, variable in attributes.items():
        if isinstance(variable, tf.Variable) and is_symbolic(symbols[id(variable)]):
            symbols[id(variable)].assign = assigns(name, variable)


def regularizers_of(layer: Any) -> dict[int, Any]:
    """Returns the regularizers of a layer's own weights, by the variables' ids."""
    regularizers = {}
    for callback in layer._callable_losses:
        loss = callback.args[0] if isinstance(callback, partial) and callback.args else callback
        if isinstance(loss, partial) and loss.func.__name__ == "_loss_for_variable":
            regularizers[id(loss.args[0])] = inspect.getclosurevars(loss.func).nonlocals[
                "regularizer"
            ]
    return regularizers
