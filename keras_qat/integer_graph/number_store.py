"""Numbers in variables: a traced graph reads the numbers of the last `assign`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import Choice


class _Slot:
    """Stands for a tensor in a structure, by its index among all tensors."""

    def __init__(self, index: int) -> None:
        self.index = index


class NumberStore:
    """Holds the tensors of a structure. Scalars of a type share a variable, as do vectors.

    Args:
        numbers: tuples, lists, dicts and dataclasses, with eager tensors among their leaves.
    """

    def __init__(self, numbers: Any) -> None:
        tensors = _tensors_in(numbers)
        indices = iter(range(len(tensors)))
        self._structure = _map_tensors(lambda tensor: _Slot(next(indices)), numbers)
        packs: dict[Any, list[int]] = {}
        for index, tensor in enumerate(tensors):
            key = (tensor.dtype.name, tensor.shape.rank) if tensor.shape.rank < 2 else index
            packs.setdefault(key, []).append(index)
        self._packs, self._shapes = packs, [tensor.shape for tensor in tensors]
        self._choices: dict[int, Choice] = {}
        packed = self._packed(tensors)
        with tf.init_scope():
            self._variables = [tf.Variable(pack, trainable=False) for pack in packed]

    def assign(self, numbers: Any) -> bool:
        """Assigns other numbers of the same structure to the variables.

        Returns:
            Whether what was traced with `read` computes with them: they choose the same branches.
        """
        packed = self._packed(_tensors_in(numbers))
        for variable, value in zip(self._variables, packed, strict=True):
            variable.assign(value)
        active = [(index, choice) for index, choice in self._choices.items() if choice.is_taken]
        return all(choice.value is self._conditions[index] for index, choice in active)

    def read(self, decides: bool) -> Any:
        """Returns the structure with tensors of the graph that is being traced.

        Args:
            decides: whether scalar conditions are `Choice`s instead of tensors.
        """
        tensors: dict[int, Any] = {}
        for pack, variable in zip(self._packs.values(), self._variables, strict=True):
            value, shapes = variable.value(), [self._shapes[index] for index in pack]
            tensors |= zip(pack, _unpacked(value, shapes), strict=True)
        conditions = self._conditions.items() if decides else ()
        self._choices = {index: Choice(value, tensors[index]) for index, value in conditions}
        known = tensors | self._choices

        def filled(leaf: Any) -> Any:
            return known[leaf.index] if isinstance(leaf, _Slot) else leaf

        return _mapped(filled, self._structure)

    def _packed(self, tensors: list[Any]) -> list[Any]:
        """Returns the values of the variables, and notes which conditions are true."""
        scalars = self._packs.get(("bool", 0), [])
        self._conditions = {index: bool(np.asarray(tensors[index])) for index in scalars}
        packs = [[tensors[index] for index in pack] for pack in self._packs.values()]
        return [_pack(pack) for pack in packs]


def ones_unless(finite: Any, numbers: Any) -> Any:
    """Returns the same structure, with ones for all real numbers unless weights are finite.

    Tables have no entry for NaN.

    Args:
        finite: a bool, or a scalar tensor.
        numbers: as for `NumberStore`.
    """
    if finite is True:
        return numbers

    def one_unless(x: Any) -> Any:
        return tf.where(finite, x, tf.ones_like(x)) if x.dtype.is_floating else x

    return _map_tensors(one_unless, numbers)


def _pack(tensors: list[Any]) -> Any:
    """Joins scalars, or vectors, to one tensor."""
    if len(tensors) == 1:
        return tensors[0]
    return tf.stack(tensors) if tensors[0].shape.rank == 0 else tf.concat(tensors, 0)


def _unpacked(value: Any, shapes: list[Any]) -> list[Any]:
    """Splits a tensor that `_pack` made into tensors of the given shapes."""
    if len(shapes) == 1:
        return [value]
    return tf.unstack(value) if shapes[0].rank == 0 else tf.split(value, [n for (n,) in shapes])


def _tensors_in(numbers: Any) -> list[Any]:
    tensors: list[Any] = []
    _map_tensors(tensors.append, numbers)
    return tensors


def _map_tensors(change: Callable[[Any], Any], numbers: Any) -> Any:
    return _mapped(lambda leaf: change(leaf) if tf.is_tensor(leaf) else leaf, numbers)


def _mapped(change: Callable[[Any], Any], numbers: Any) -> Any:
    """Returns a structure with other leaves."""
    if isinstance(numbers, (tuple, list)):
        parts = [_mapped(change, part) for part in numbers]
        return type(numbers)(*parts) if hasattr(numbers, "_fields") else tuple(parts)
    if isinstance(numbers, dict):
        return {name: _mapped(change, part) for name, part in numbers.items()}
    if dataclasses.is_dataclass(numbers) and not isinstance(numbers, type):
        names = [field.name for field in dataclasses.fields(numbers)]
        fields = {name: _mapped(change, getattr(numbers, name)) for name in names}
        return dataclasses.replace(numbers, **fields)
    return change(numbers)
