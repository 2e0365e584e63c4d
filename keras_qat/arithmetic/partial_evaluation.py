"""What a graph computes from numbers that are known when it is traced: once, and not in the graph.

What kernels multiply by follows from ranges and weights alone. While inference is traced for them
(`resolved/settled.py`), functions of numbers are computed right away instead of being traced, and
branches that numbers choose are taken. That saves most of the operations of a graph, and so most
of the time before the first batch.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

__all__ = ["Stage", "decided", "of_numbers", "staging"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Stage:
    """The numbers that are known while a graph is traced, and what was computed from them.

    Args:
        graph: the graph.
        numbers: its tensors that stand for known numbers.
        values: what those are.
        decides: whether branches that they choose are taken, instead of being traced all.
    """

    def __init__(
        self, graph: Any, numbers: Sequence[Any], values: Sequence[Any], decides: bool = True
    ) -> None:
        self.graph, self.numbers, self.decides = graph, numbers, decides
        self._values = _by_ref(numbers, values)
        self._steps: list[tuple[Callable[..., Any], Any, Any]] = []
        """What was computed: function, its arguments and results, as tensors of the graph."""
        self._decisions: list[tuple[Any, bool]] = []

    def value_of(self, number: Any) -> Any:
        """The value of one of the graph's tensors, or None if it is not known."""
        return _value(self._values, number)

    def knows(self, args: Any) -> bool:
        """Whether all tensors among the arguments are known, and at least one of the graph's."""
        tensors = [each for each in _leaves(args) if tf.is_tensor(each)]
        is_known = (_is_eager(each) or self.value_of(each) is not None for each in tensors)
        return any(not _is_eager(each) for each in tensors) and all(is_known)

    def computed(self, function: Callable[..., Any], args: Any) -> Any:
        """The results of a function of known numbers, as tensors of the graph."""
        values = _computed(self._values, function, args)
        with self.graph.as_default():
            results = _mapped(_placeholder, values)
        self._values |= _by_ref(_leaves(results), _leaves(values))
        self._steps.append((function, args, results))
        return results

    def decided(self, predicate: Any) -> bool | None:
        """The value of a predicate on which the graph depends from now on; None if not known."""
        value = self.value_of(predicate) if self.decides else None
        if value is None:
            return None
        self._decisions.append((predicate, bool(value)))
        return bool(value)

    def known(self, numbers: Sequence[Any] | None = None) -> dict[str, Any] | None:
        """Values of the graph's tensors by name.

        Args:
            numbers: other values of its numbers; by default those it was traced for.

        Returns:
            The values; None if with these numbers the graph would be another one.
        """
        values = self._values
        if numbers is not None:
            values = _by_ref(self.numbers, numbers)
            for function, args, results in self._steps:
                found = _computed(values, function, args)
                values |= _by_ref(_leaves(results), _leaves(found))
            if any(bool(_value(values, each)) is not taken for each, taken in self._decisions):
                return None
        return {ref.deref().name: value for ref, value in values.items()}

    def forget(self) -> None:
        """Lets go of the values that the graph was traced for: weights are among them."""
        self._values = {}


_STAGE: contextvars.ContextVar[Stage | None] = contextvars.ContextVar("stage", default=None)


@contextlib.contextmanager
def staging(stage: Stage) -> Iterator[None]:
    """Runs a block, which traces the stage's graph, with its numbers being known."""
    token = _STAGE.set(stage)
    try:
        yield
    finally:
        _STAGE.reset(token)


def of_numbers(function: _Function) -> _Function:
    """A function that is computed, not traced, where the tensors among its arguments are known.

    Args:
        function: of tensors, structures and dataclasses of them, and of anything else; without
            state.
    """

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        stage = _STAGE.get()
        if stage is None or tf.executing_eagerly() or not stage.knows(args):
            return function(*args)
        return stage.computed(function, args)

    return called  # type: ignore[return-value]


def decided(predicate: Any) -> bool | None:
    """Whether a predicate is true, if that is known while a graph is traced."""
    if isinstance(predicate, bool):
        return predicate
    stage = _STAGE.get()
    return None if stage is None or tf.executing_eagerly() else stage.decided(predicate)


def _is_eager(each: Any) -> bool:
    return isinstance(each, tf.__internal__.EagerTensor)


def _placeholder(value: Any) -> Any:
    if not tf.is_tensor(value):
        return value
    return tf.raw_ops.Placeholder(dtype=value.dtype, shape=value.shape)


def _value(values: dict[Any, Any], number: Any) -> Any:
    """The value of a tensor, constants of the graph among them."""
    found = values.get(number.ref())
    return tf.get_static_value(number) if found is None and number.op.type == "Const" else found


def _computed(values: dict[Any, Any], function: Callable[..., Any], args: Any) -> Any:
    def given(each: Any) -> Any:
        is_number = tf.is_tensor(each) and not _is_eager(each)
        return tf.convert_to_tensor(_value(values, each)) if is_number else each

    with tf.init_scope():
        return function(*_mapped(given, args))


def _by_ref(tensors: Sequence[Any], values: Sequence[Any]) -> dict[Any, Any]:
    pairs = zip(tensors, values, strict=True)
    return {each.ref(): value for each, value in pairs if tf.is_tensor(each)}


def _mapped(change: Callable[[Any], Any], each: Any) -> Any:
    """A structure with its leaves changed; dataclasses are structures."""
    if isinstance(each, (tuple, list)):
        return tuple(_mapped(change, part) for part in each)
    if dataclasses.is_dataclass(each) and not isinstance(each, type):
        fields = {part.name: getattr(each, part.name) for part in dataclasses.fields(each)}
        changed = {name: _mapped(change, part) for name, part in fields.items()}
        return dataclasses.replace(each, **changed)
    return change(each)


def _leaves(each: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(found.append, each)
    return found
