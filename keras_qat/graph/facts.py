"""Computes properties of tensors, such as "never negative", by rules.

A rule is a generator. To ask for the property of another tensor, it yields that tensor. Rules are
evaluated once per tensor. `lowering/read_operations.py` has examples of rules.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import draws_random_numbers, is_operation, name_in_tensorflow

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")
Node = TypeVar("Node", bound=Hashable)

Rule = Callable[[Question], Generator[Question, Any, Answer]]
"""A generator that yields questions, receives the answers, and returns an answer."""


class Facts:
    """Evaluates rules for the tensors of a graph, and caches the answers.

    Create a new object after a change of the graph.

    Example:
        >>> def is_non_negative(value):
        ...     kind, operands = read_operation(value.producer) if value.producer else ("", [])
        ...     if kind != "add":
        ...         return kind in ("exp", "relu")
        ...     known = []
        ...     for x in operands:
        ...         known.append((yield x) if isinstance(x, Value) else np.min(x) >= 0)
        ...     return all(known)
        >>> Facts().find(is_non_negative, graph.outputs)
    """

    def __init__(self) -> None:
        self._answers: dict[Any, dict[Any, Any]] = {}

    def find(self, rule: Rule[Question, Answer], question: Question) -> Answer:
        """Returns the answer of a rule for `question`, a tensor or any other key."""
        return solve(question, rule, self._answers.setdefault(rule, {}))


def reach(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Returns `starts` and all their direct and indirect successors, in depth-first order.

    Args:
        starts: tensors or calls.
        following: function that returns the successors of a tensor or call.
    """
    found: dict[Node, None] = {}
    pending = list(starts)[::-1]
    while pending:
        node = pending.pop()
        if node not in found:
            found[node] = None
            pending += list(following(node))[::-1]
    return list(found)


def solve(
    question: Question, rule: Rule[Question, Answer], known: dict[Question, Answer] | None = None
) -> Answer:
    """Returns the answer of a rule. An answer may depend on the answers for other tensors.

    This function visits each tensor once. A recursive function would visit a tensor once for each
    path. For example, n lines of `y = tf.maximum(y, tf.reverse(y, [1]))` have 2^n paths.

    Args:
        question: a value of the graph, or any other key.
        rule: the rule.
        known: earlier answers. New answers are added. Pass the same dictionary only while the graph
            does not change.
    """
    answers = {} if known is None else known
    if question in answers:
        return answers[question]
    pending = [(question, rule(question))]
    answer: Any = None
    while pending:
        asked, steps = pending[-1]
        try:
            needed = steps.send(answer)
        except StopIteration as end:
            answer = answers[asked] = end.value
            pending.pop()
            continue
        answer = answers.get(needed)
        if needed not in answers:
            pending.append((needed, rule(needed)))
    return answers[question]


def describe_argument(leaf: object) -> Hashable:
    """Returns a key for an argument. Equal arguments have equal keys.

    The key of an array contains all bytes, because `repr` omits the middle of a large array.
    """
    if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable):
        constant = tf.get_static_value(leaf)
        leaf = leaf if constant is None else constant
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return str(leaf.dtype), leaf.shape, leaf.tobytes()
    return repr(leaf)


def describe_arguments(call: Call, name: Callable[[Value], Hashable]) -> Hashable:
    """Returns a key for the arguments of a call. Calls with equal arguments have equal keys.

    Args:
        call: the call.
        name: function that returns the key of an input of the call.
    """
    arguments = call.args, call.kwargs
    structure = tf.nest.map_structure(lambda _: None, arguments)
    leaves = tf.nest.flatten(arguments)
    keys = [name(leaf) if isinstance(leaf, Value) else describe_argument(leaf) for leaf in leaves]
    return repr(structure), tuple(keys)


def identify_function(call: Call) -> Hashable | None:
    """Returns the name of a call's TensorFlow function.

    Returns None for random operations and for Keras layers, which may have state. Two calls of them
    may return different results.
    """
    is_function = is_operation(call.layer) and not draws_random_numbers(call.layer)
    return name_in_tensorflow(call.layer) if is_function else None


class StructuralKeys:
    """Assigns indices to tensors. Tensors that are computed in the same way have equal indices.

    Args:
        identify: function that returns a key for a call. Calls with equal keys compute the same
            function. The key None marks a call that equals no other call.
    """

    def __init__(self, identify: Callable[[Call], Hashable | None] = identify_function) -> None:
        self._identify = identify
        self._indices: dict[Hashable, int] = {}
        self._known: dict[Value, int] = {}

    def is_same(self, first: Value, second: Value) -> bool:
        return first is second or self.find_index(first) == self.find_index(second)

    def find_index(self, value: Value) -> int:
        return solve(value, self._find_index, self._known)

    def _find_index(self, value: Value) -> Generator[Value, Any, int]:
        call = value.producer
        key: Hashable = id(value)
        if call is not None and len(tf.nest.flatten(call.outputs)) == 1:
            identity = self._identify(call)
            if identity is not None:
                indices = {}
                for read in call.inputs:
                    indices[read] = yield read
                key = identity, describe_arguments(call, indices.__getitem__)
        return self._indices.setdefault(key, len(self._indices))
