"""Answers recursive questions about a graph: each once, and without Python's recursion limit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import Any, TypeVar

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")

Rule = Callable[[Question], Generator[Question, Any, Answer]]
"""A generator that yields the questions it depends on, gets their answers, and returns its own."""


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

    Returns:
        The answer.

    Example:
        >>> def depth(value):  # How many calls lie between a value and the model's inputs?
        ...     depths = []
        ...     for read in value.producer.inputs if value.producer else ():
        ...         depths.append((yield read))
        ...     return 1 + max(depths) if depths else 0
        >>> solve(graph.outputs, depth)
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
