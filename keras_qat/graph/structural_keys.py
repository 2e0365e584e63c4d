"""Tells whether two tensors are computed by equal operations from equal tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, values_in
from keras_qat.graph.facts import solve
from keras_qat.graph.operations import (
    draws_random_numbers,
    is_operation,
    name_in_tensorflow,
)


def describe(leaf: Any) -> Hashable:
    """Return a key that equal arguments share.

    The text of a large array leaves out the middle, so arrays are described by all their bytes.
    """
    if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable):
        constant = tf.get_static_value(leaf)
        leaf = leaf if constant is None else constant
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return str(leaf.dtype), leaf.shape, leaf.tobytes()
    return repr(leaf)


def describe_arguments(call: Call, name: Callable[[Value], Hashable]) -> Hashable:
    """Return a key that calls with equal arguments share.

    Args:
        call: the call.
        name: returns the key of a tensor that the call reads.
    """
    arguments = call.args, call.kwargs
    structure = tf.nest.map_structure(lambda _: None, arguments)
    leaves = tf.nest.flatten(arguments)
    described = [name(leaf) if isinstance(leaf, Value) else describe(leaf) for leaf in leaves]
    return repr(structure), tuple(described)


class StructuralKeys:
    """Numbers the tensors of a graph so that tensors computed in the same way share a number.

    Only results of operations can share one. A layer may have weights or a state of its own.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Value, int] = {}

    def is_same(self, first: Value, second: Value) -> bool:
        """Tell whether two tensors are one, or the results of equal operations."""
        return first is second or self.number(first) == self.number(second)

    def number(self, value: Value) -> int:
        """Return the number of a tensor."""
        return solve(value, self._find_number, self._known)

    def _find_number(self, value: Value) -> Generator[Value, Any, int]:
        call = value.producer
        key: Hashable = id(value)
        if call is not None and _is_function_of_inputs(call):
            numbers = {}
            for read in call.inputs:
                numbers[read] = yield read
            key = name_in_tensorflow(call.layer), describe_arguments(call, numbers.__getitem__)
        return self._numbers.setdefault(key, len(self._numbers))


def _is_function_of_inputs(call: Call) -> bool:
    """Tell whether the one result of a call depends on nothing but its arguments."""
    if not is_operation(call.layer) or draws_random_numbers(call.layer):
        return False
    return len(values_in(call.outputs)) == 1
