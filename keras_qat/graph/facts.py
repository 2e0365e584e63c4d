"""Answers questions about the tensors of a graph: each once, without Python's recursion limit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any, TypeVar

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")
Node = TypeVar("Node", bound=Hashable)

Rule = Callable[[Question], Generator[Question, Any, Answer]]
"""A generator that yields the questions it depends on, gets their answers, and returns its own."""


class Facts:
    """What is known about the tensors of a graph before it runs.

    Answers are kept, so use one object only while the graph does not change.

    Example:
        >>> def is_non_negative(value):
        ...     call = value.producer
        ...     if call is None or get_kind(call) not in ("exp", "relu", *MOVES):
        ...         return False
        ...     for x in call.inputs if get_kind(call) in MOVES else ():
        ...         if not (yield x):
        ...             return False
        ...     return True
        >>> Facts().find(is_non_negative, graph.outputs)
    """

    def __init__(self) -> None:
        self._answers: dict[Any, dict[Any, Any]] = {}

    def find(self, rule: Rule[Question, Answer], question: Question) -> Answer:
        """Return the answer of a rule for a tensor, or for any other question it understands."""
        return solve(question, rule, self._answers.setdefault(rule, {}))


def reach(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Return the starts and all that follows from them, each once, in depth-first order.

    Args:
        starts: tensors or calls.
        following: returns what follows from one of them, such as `lambda call: call.inputs`.
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
    """Answer a question by a rule that asks the same about other tensors.

    A recursive function visits a tensor once for every path that leads to it, which takes
    exponential time in a chain of `y = tf.maximum(y, tf.reverse(y, [1]))`. This visits it once.

    Args:
        question: a value of the graph, or any other key.
        rule: computes the answer to one question.
        known: earlier answers, which this call extends. Pass the same dictionary only while the
            graph does not change.
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
