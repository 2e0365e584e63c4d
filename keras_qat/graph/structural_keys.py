"""Tells whether two tensors are computed by equal operations from equal tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.facts import solve
from keras_qat.graph.operations import (
    draws_random_numbers,
    is_operation,
    name_in_tensorflow,
)


def describe_argument(leaf: Any) -> Hashable:
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
    described = [
        name(leaf) if isinstance(leaf, Value) else describe_argument(leaf) for leaf in leaves
    ]
    return repr(structure), tuple(described)


def identify_function(call: Call) -> Hashable | None:
    """Return a key that operations of one name share; None for layers and random operations.

    A layer may have weights or a state of its own.
    """
    is_function = is_operation(call.layer) and not draws_random_numbers(call.layer)
    return name_in_tensorflow(call.layer) if is_function else None


class StructuralKeys:
    """Numbers the tensors of a graph so that tensors computed in the same way share a number.

    Args:
        identify: returns a key that calls share if equal inputs give equal outputs, or None.
    """

    def __init__(self, identify: Callable[[Call], Hashable | None] = identify_function) -> None:
        self._identify = identify
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Value, int] = {}

    def is_same(self, first: Value, second: Value) -> bool:
        """Tell whether two tensors are one, or the results of equal calls."""
        return first is second or self.number(first) == self.number(second)

    def number(self, value: Value) -> int:
        """Return the number of a tensor."""
        return solve(value, self._find_number, self._known)

    def _find_number(self, value: Value) -> Generator[Value, Any, int]:
        call = value.producer
        has_one_output = call is not None and len(tf.nest.flatten(call.outputs)) == 1
        identity = self._identify(call) if call is not None and has_one_output else None
        key: Hashable = id(value)
        if call is not None and identity is not None:
            numbers = {}
            for read in call.inputs:
                numbers[read] = yield read
            key = identity, describe_arguments(call, numbers.__getitem__)
        return self._numbers.setdefault(key, len(self._numbers))
