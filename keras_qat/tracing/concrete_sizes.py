"""Evaluates size expressions, such as `tf.shape(x)[1]`, while a layer is traced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.graph.operations import draws_random_numbers, get_kind, is_operation, read_array
from keras_qat.graph.sizes import BATCHES
from keras_qat.keras2.backend import KerasTensor, is_symbolic, patch_members

HELD = "keras_qat: the number"
"""Name of an attribute that stores the value of a symbolic tensor, if the value is known."""


class _Unknown(Exception):
    """Raised for a symbolic tensor without a known value."""


def find_value(tensor: Any) -> NDArray[Any] | None:
    """Returns the value of a constant or a size, such as `tf.shape(x)[1]`, or None."""
    if not is_symbolic(tensor):
        return np.asarray(tensor)
    try:
        with tf.init_scope():
            first, second = (_compute(tensor, batch) for batch in BATCHES)
    except _Unknown:
        return None
    return first if np.array_equal(first, second) else None


def _compute(tensor: KerasTensor, batch: int) -> NDArray[Any]:
    layer, _, index = tensor._keras_history
    if not is_operation(layer) and (value := vars(tensor).get(HELD)) is not None:
        return np.asarray(value)  # A constant.
    if not is_operation(layer) or draws_random_numbers(layer):
        raise _Unknown
    node, kind = tensor.node, get_kind(layer)
    if kind in ("rank", "shape", "size"):
        shape = node.keras_inputs[0].shape
        if shape.rank is None or None in shape[1:]:
            raise _Unknown
        sizes = [batch if size is None else size for size in shape]
        result = {"rank": len(sizes), "size": np.prod(sizes)}.get(kind, sizes)
        return np.array(result, tensor.dtype.as_numpy_dtype)

    def compute(leaf: Any) -> Any:
        return tf.constant(_compute(leaf, batch)) if is_symbolic(leaf) else leaf

    args, kwargs = tf.nest.map_structure(compute, (node.call_args, node.call_kwargs))
    return np.asarray(tf.nest.flatten(layer.call(*args, **kwargs))[index])


def make_symbols_of_values(outputs: object) -> Any:
    """Converts constants in a layer's outputs to symbolic tensors, which a Keras model requires."""
    computed = next(filter(is_symbolic, tf.nest.flatten(outputs)), None)

    def make_symbol(output: Any) -> Any:
        if output is None or computed is None or is_symbolic(output):
            return output
        if isinstance(output, bool):
            return tf.equal(0 * tf.shape(computed)[0] + output, 1)
        if read_array(output) is None:
            return output
        held = tf.convert_to_tensor(output)
        return tf.cast(0 * tf.shape(computed)[0], held.dtype) + held

    return tf.nest.map_structure(make_symbol, outputs)


def read_sizes_as_integers() -> contextlib.AbstractContextManager[None]:
    """Lets Python code read size expressions as integers inside a `with` block.

    Examples are `len(tf.shape(x))`, `range(tf.shape(x)[1])` and `if tf.rank(x) == 3`. TensorFlow
    and Keras still see symbolic tensors.

    Keras would reject a vector of negative integers as an invalid shape. The block permits it.
    """
    create = KerasTensor.from_tensor

    def from_tensor(tensor: Any) -> KerasTensor:
        try:
            symbol = create(tensor)
        except ValueError:
            symbol = KerasTensor(tf.type_spec_from_value(tensor), name=tensor.name)
        if getattr(symbol.type_spec, "shape", None) == ():
            vars(symbol)[HELD] = tf.get_static_value(tf.convert_to_tensor(tensor))
        return symbol

    names = "__len__", "__bool__", "__index__", "__iter__", "from_tensor"
    before = {name: vars(KerasTensor).get(name) for name in names}

    def count(tensor: KerasTensor) -> Any:
        size = tensor.shape[0] if tensor.shape.rank else None
        return before["__len__"](tensor) if size is None or not is_called_by_user() else size

    def convert(to: Callable[[Any], Any]) -> Any:
        def convert_symbol(tensor: KerasTensor) -> Any:
            value = find_value(tensor) if is_called_by_user() else None
            return before["__len__"](tensor) if value is None else to(value)

        return convert_symbol

    def iterate(tensor: KerasTensor) -> Iterator[Any]:
        value = find_value(tensor) if is_called_by_user() else None
        return before["__iter__"](tensor) if value is None else iter(tf.constant(value))

    new = count, convert(bool), convert(int), iterate, staticmethod(from_tensor)
    return patch_members(KerasTensor, **dict(zip(names, new, strict=True)))


def is_called_by_user(*others: str) -> bool:
    """Tells a replaced function, such as `__len__`, whether custom code has called it.

    Keras, NumPy, TensorFlow and the packages `others` do not count as custom code.
    """
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "call_by_thread":  # A wrapper of `patch_members`.
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", ""))
    return module.split(".")[0] not in ("keras", "numpy", "tensorflow", "tf_keras", *others)
