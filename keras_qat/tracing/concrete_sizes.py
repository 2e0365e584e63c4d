"""What depends on sizes alone is a number for Python, while the code of a layer is traced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import draws_random_numbers, get_kind, is_operation, read_array
from keras_qat.graph.sizes import BATCHES
from keras_qat.keras2.backend import is_symbolic, keras, patch_members

HELD = "keras_qat: the number"
"""Attribute of a symbol with the number that it holds, if that is known."""


class _Unknown(Exception):
    """Raised for a tensor that depends on more than sizes."""


def find_value(tensor: Any) -> Any:
    """Returns what a symbolic tensor or a number holds; None if it depends on more than sizes."""
    if not is_symbolic(tensor):
        return np.asarray(tensor)
    try:
        with tf.init_scope():
            first, second = (_computed(tensor, batch) for batch in BATCHES)
    except _Unknown:
        return None
    return first if np.array_equal(first, second) else None


def _computed(tensor: Any, batch: int) -> Any:
    layer, _, index = tensor._keras_history
    if not is_operation(layer) and (number := vars(tensor).get(HELD)) is not None:
        return np.asarray(number)  # That a layer returned.
    if not is_operation(layer) or draws_random_numbers(layer):
        raise _Unknown
    node, kind = tensor.node, get_kind(layer)
    if kind in ("rank", "shape", "size"):
        shape = node.keras_inputs[0].shape
        if shape.rank is None or None in shape[1:]:
            raise _Unknown
        sizes = [batch if size is None else size for size in shape]
        number = {"rank": len(sizes), "size": np.prod(sizes)}.get(kind, sizes)
        return np.array(number, tensor.dtype.as_numpy_dtype)

    def number_of(leaf: Any) -> Any:
        return tf.constant(_computed(leaf, batch)) if is_symbolic(leaf) else leaf

    args, kwargs = tf.nest.map_structure(number_of, (node.call_args, node.call_kwargs))
    return np.asarray(tf.nest.flatten(layer.call(*args, **kwargs))[index])


def make_symbols_of_values(outputs: Any) -> Any:
    """Gives numbers beside computed tensors, such as an image's size, symbols that hold them."""
    computed = next(filter(is_symbolic, tf.nest.flatten(outputs)), None)

    def symbol(output: Any) -> Any:
        if output is None or computed is None or is_symbolic(output):
            return output
        if isinstance(output, bool):
            return tf.equal(0 * tf.shape(computed)[0] + output, 1)
        if read_array(output) is None:
            return output
        held = tf.convert_to_tensor(output)
        return tf.cast(0 * tf.shape(computed)[0], held.dtype) + held

    return tf.nest.map_structure(symbol, outputs)


@contextlib.contextmanager
def read_sizes_as_integers() -> Iterator[None]:
    """Runs a block in which Python reads symbolic tensors that depend on sizes alone as numbers.

    These are `len(tf.shape(x))`, `range(tf.shape(x)[1])`, `if tf.rank(x) == 3` and the like, which
    AutoGraph takes too. TensorFlow and Keras themselves see symbols as before. Keras takes integers
    along one axis for sizes, of which negative ones are an error; here they are just numbers.
    """
    kind: Any = type(keras.Input((1,)))
    as_symbol = kind.from_tensor

    def symbol_of(tensor: Any) -> Any:
        try:
            symbol = as_symbol(tensor)
        except ValueError:
            symbol = kind(tf.type_spec_from_value(tensor), name=tensor.name)
        if getattr(symbol.type_spec, "shape", None) == ():
            vars(symbol)[HELD] = tf.get_static_value(tf.convert_to_tensor(tensor))
        return symbol

    names = "__len__", "__bool__", "__index__", "__iter__", "from_tensor"
    before = {name: vars(kind).get(name) for name in names}

    def length(tensor: Any) -> int:
        size = tensor.shape[0] if tensor.shape.rank else None
        return before["__len__"](tensor) if size is None or not asked_by_user() else size

    def convert(to: Callable[[Any], Any]) -> Any:
        def converted(tensor: Any) -> Any:
            number = find_value(tensor) if asked_by_user() else None
            return before["__len__"](tensor) if number is None else to(number)

        return converted

    def steps(tensor: Any) -> Iterator[Any]:
        number = find_value(tensor) if asked_by_user() else None
        return before["__iter__"](tensor) if number is None else iter(tf.constant(number))

    new = length, convert(bool), convert(int), steps, staticmethod(symbol_of)
    with patch_members(kind, **dict(zip(names, new, strict=True))):
        yield


def asked_by_user(*others: str) -> bool:
    """Returns whether a user's own code calls the method that calls this function.

    Args:
        others: packages that are not a user's, besides Keras, NumPy and TensorFlow.
    """
    frame: Any = sys._getframe(2)
    while (
        frame.f_code.co_name == "call_by_thread"
        and frame.f_globals["__name__"] == patch_members.__module__
    ):
        frame = frame.f_back  # What calls the function for one thread alone.
    module = str(frame.f_globals.get("__name__", ""))
    return module.split(".")[0] not in ("keras", "numpy", "tensorflow", "tf_keras", *others)
