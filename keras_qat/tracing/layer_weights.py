"""Finds the weights of a layer, and replaces them by symbolic tensors while it is traced.

A mask is a non-trainable variable that hides attention scores, as in window attention.
"""

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

from keras_qat.keras2.backend import KerasTensor, is_symbolic, keras, make_input, patch_members
from keras_qat.messages import LIBRARIES, get_package
from keras_qat.tracing.concrete_sizes import HELD, is_called_by_user

_TRACKED = ("_trainable_weights", "_non_trainable_weights", "_self_", "_captured", "_obj_ref")
"""Prefixes of internal attributes of Keras. They are not searched for weights."""

_NO_HOLDERS = (type, FunctionType, ModuleType, tf.Variable, keras.layers.Layer)

MASKS = -100.0
"""Additive masks have at most this value at hidden scores, and -10 to 10 at all others."""


def find_weight_holders(layer: keras.layers.Layer) -> list[tuple[Any, dict[str, Any]]]:
    """Returns pairs `(object, weights)` for a layer and for custom objects in its attributes.

    An example of such an object is a `tf.Module`. Keras trains variables of a `tf.Module` too.
    `weights` maps names of attributes to variables, or to lists or dicts of variables.
    """
    holders: list[tuple[Any, dict[str, Any]]] = []
    seen = set[int]()

    def visit(value: Any) -> None:
        if isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                visit(item)
        elif value is layer or (id(value) not in seen and _is_custom_object(value)):
            seen.add(id(value))
            own = {name: x for name, x in vars(value).items() if not name.startswith(_TRACKED)}
            if weights := {name: x for name, x in own.items() if _has_variables(x)}:
                holders.append((value, weights))
            for item in own.values():
                visit(item)

    visit(layer)
    return holders


def _has_variables(value: object) -> bool:
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return any(map(_has_variables, items))
    return isinstance(value, tf.Variable)


def _is_custom_object(value: object) -> bool:
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDERS)
    return has_attributes and get_package(type(value)) not in LIBRARIES


def make_substitute(variable: tf.Variable) -> tf.Tensor | KerasTensor:
    """Returns the tensor that traced code reads instead of a variable.

    It is a constant for a mask, and otherwise symbolic. Python code can still read the value of a
    non-trainable integer, as in `if self.flag`.
    """
    if is_constant_mask(variable):
        return tf.constant(variable.numpy())
    symbol = make_input(variable.shape, variable.dtype)
    if not (variable.trainable or variable.dtype.is_floating or variable.dtype.is_complex):
        vars(symbol)[HELD] = variable.numpy()
    symbol.value = symbol.read_value = lambda: symbol
    return symbol


def is_constant_mask(variable: tf.Variable) -> bool:
    """Returns True if a variable is a mask of attention scores.

    Masks are not trainable. They contain booleans, or only 0 and 1, or additive scores: values near
    0 and values of -100 or less.
    """
    kind, size = variable.dtype, variable.shape.num_elements()
    if variable.trainable or not size or size < 2 or kind.is_complex:
        return False
    if not (kind.is_floating or kind.is_integer):
        return kind == tf.bool
    values = variable.numpy()
    if values.min() >= 0:
        return bool(values.min() == 0 and values.any() and np.isin(values, (0, 1)).all())
    masked = values <= MASKS
    return masked.any() and not masked.all() and np.abs(values[~masked]).max() <= -MASKS / 10


def hash_constant_masks(model: keras.Model) -> list[int]:
    """Returns a checksum of each mask in `model.weights`."""
    masks = filter(is_constant_mask, model.weights)
    return [zlib.crc32(weight.numpy().tobytes()) for weight in masks]


def replace_variables(value: object, symbols: dict[int, Any]) -> Any:
    """Replaces variables in nested lists and dicts. `symbols` maps ids of variables to tensors."""
    if isinstance(value, dict):
        return {key: replace_variables(item, symbols) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_variables(item, symbols) for item in value]
    return symbols.get(id(value), value)


@contextlib.contextmanager
def list_symbols_as_weights(symbols: dict[int, Any]) -> Iterator[None]:
    """Makes `layer.weights` and similar lists contain symbolic tensors inside a `with` block.

    `symbols` maps the id of a variable to a symbolic tensor.
    """

    def replace(before: Any) -> property:
        def get_weights(layer: keras.layers.Layer) -> Any:
            weights = before.fget(layer)
            return replace_variables(weights, symbols) if is_called_by_user() else weights

        return property(get_weights, before.fset)

    names = [f"{kind}{name}" for kind in ("", "trainable_") for name in ("weights", "variables")]
    with contextlib.ExitStack() as block:
        for kind in (keras.Model, keras.Sequential, keras.layers.Layer):
            lists = {name: replace(vars(kind)[name]) for name in names if name in vars(kind)}
            block.enter_context(patch_members(kind, **lists))
        yield


def let_assign(
    layer: object, attributes: dict[str, Any], symbols: dict[int, Any], assigned: dict[int, Any]
) -> None:
    """Makes `layer.kernel.assign(x)` set `layer.kernel` to `x` while the layer is traced.

    Args:
        layer, attributes: the object that has weights, and its weights by name.
        symbols: maps the id of a variable to a symbolic tensor.
        assigned: filled during tracing. Maps the id of a variable to its new value.
    """

    def make_assign(name: str, variable: tf.Variable) -> Callable[..., Any]:
        def assign(value: Any, *args: object, **kwargs: object) -> Any:
            assigned[id(variable)] = vars(layer)[name] = value
            value.assign = assign
            return value

        return assign

    for name, variable in attributes.items():
        if isinstance(variable, tf.Variable) and is_symbolic(symbols[id(variable)]):
            symbols[id(variable)].assign = make_assign(name, variable)


def get_regularizers(layer: keras.layers.Layer) -> dict[int, Any]:
    """Maps the id of each variable of the layer to its regularizer."""
    regularizers = {}
    for callback in layer._callable_losses:
        loss = callback.args[0] if isinstance(callback, partial) and callback.args else callback
        if isinstance(loss, partial) and loss.func.__name__ == "_loss_for_variable":
            names = inspect.getclosurevars(loss.func).nonlocals
            regularizers[id(loss.args[0])] = names["regularizer"]
    return regularizers
