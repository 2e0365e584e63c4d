"""Scalars of many callers that go through the same function, computed as one vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(eq=False)
class _Request:
    scalars: tuple[Any, ...]
    graph: Any
    results: tuple[Any, ...] | None = None


class SharedFunction:
    """A function of scalars that computes the results of all who ask with the same operations.

    A graph of many operations on single numbers takes longer to launch than to compute. Who asks
    early and needs the result late, such as a gradient, shares operations with all others.

    Args:
        function: takes scalars, or vectors of equal length, and returns a tuple of the same.
    """

    def __init__(self, function: Callable[..., tuple[Any, ...]]) -> None:
        self._function = function
        self._waiting: list[_Request] = []

    def later(self, *scalars: Any) -> Callable[[], tuple[Any, ...]]:
        """Returns a function that gives the results for some scalars when they are needed.

        Its first call computes those of everybody who has asked in the same graph so far.
        """
        request = _Request(scalars, _graph())
        self._waiting.append(request)
        return partial(self._results, request)

    def _results(self, request: _Request) -> tuple[Any, ...]:
        if _graph() is not request.graph or request.graph is None:
            return self._function(*request.scalars)
        if request.results is None:
            requests = [waiting for waiting in self._waiting if waiting.graph is request.graph]
            self._waiting = [waiting for waiting in self._waiting if waiting not in requests]
            rows = (waiting.scalars for waiting in requests)
            for waiting, results in zip(
                requests, apply_to_rows(self._function, *rows), strict=True
            ):
                waiting.results = results
        assert request.results is not None
        return request.results


def apply_to_rows(
    function: Callable[..., tuple[Any, ...]], *rows: tuple[Any, ...]
) -> list[tuple[Any, ...]]:
    """Applies a function to rows of scalars with operations on vectors; returns rows of results."""
    if len(rows) == 1:
        return [function(*rows[0])]
    first, *others = zip(*rows, strict=True)
    vectors = function(tf.stack(first), *map(_column, others))
    results = (tf.unstack(vector, len(rows)) for vector in vectors)
    return list(zip(*results, strict=True))


def _column(scalars: tuple[Any, ...]) -> Any:
    """Returns scalars as a vector, or one of them if all are that."""
    first = scalars[0]
    return first if all(scalar is first for scalar in scalars) else tf.stack(scalars)


def _graph() -> Any:
    """Returns the graph that is traced, or None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
