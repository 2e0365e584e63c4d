"""Unrolls TensorFlow's loops, and executes one branch of `tf.cond`, while a layer is traced."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import is_symbolic, keras, patch_members
from keras_qat.tracing.concrete_sizes import find_value
from keras_qat.tracing.mapped_examples import NotKnown, map_examples

MOST_STEPS = 32
"""Maximum number of unrolled steps. A step of a recurrent layer becomes about 20 calls."""


@contextlib.contextmanager
def unroll_loops() -> Iterator[None]:
    """Unrolls loops with a known number of steps inside a `with` block.

    Loops are `tf.scan`, `tf.map_fn`, `tf.vectorized_map`, `tf.while_loop` and `K.rnn`. `tf.cond`
    executes one branch if the condition is known. A list replaces `tf.TensorArray`.
    """
    backend: Any = inspect.getmodule(keras.backend.rnn)
    with contextlib.ExitStack() as block:
        for module in (tf, tf.compat.v1, backend.tf, backend.tf.compat.v1):
            members = {
                name: _prefer(new, getattr(module, name))
                for name, new in _REPLACEMENTS.items()
                if hasattr(module, name)
            }
            block.enter_context(patch_members(module, **members))
        block.enter_context(patch_members(keras.backend, rnn=_rnn))
        block.enter_context(patch_members(backend, rnn=_rnn))
        yield


def _prefer(new: Callable[..., Any], old: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `new`. If `new` raises `NotKnown`, it calls `old`.

    In graph mode, it always calls `old`, because Keras builds inner layers in graph mode.
    """

    def call(*args: object, **kwargs: object) -> Any:
        with contextlib.suppress(NotKnown):
            if tf.executing_eagerly():
                return new(*args, **kwargs)
        return old(*args, **kwargs)

    return call


def _split_steps(elems: Any) -> list[Any]:
    flat = tf.nest.flatten(elems)
    steps = flat[0].shape[:1].as_list() if all(map(tf.is_tensor, flat)) else [None]
    if steps[0] not in range(1, MOST_STEPS + 1):
        raise NotKnown
    columns = [tf.unstack(x, steps[0]) for x in flat]
    return [tf.nest.pack_sequence_as(elems, row) for row in zip(*columns, strict=True)]


def _scan(
    fn: Callable[[Any, Any], Any],
    elems: Any,
    initializer: Any = None,
    *args: object,
    reverse: bool = False,
    **kwargs: object,
) -> Any:
    if args:
        raise NotKnown
    rows = _split_steps(elems)
    rows = rows[::-1] if reverse else rows
    states = [rows.pop(0) if initializer is None else initializer]
    for row in rows:
        states.append(fn(states[-1], row))
    states = states if initializer is None else states[1:]
    return tf.nest.map_structure(lambda *x: tf.stack(x[::-1] if reverse else x), *states)


def _map(fn: Callable[[Any], Any], elems: Any, *args: object, **kwargs: object) -> Any:
    if tf.nest.flatten(elems)[0].shape[:1] == [None]:
        return map_examples(fn, elems)
    results = list(map(fn, _split_steps(elems)))
    return tf.nest.map_structure(lambda *x: tf.stack(x), *results)


def _while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    *args: object,
    maximum_iterations: Any = None,
    **kwargs: object,
) -> Any:
    state, most = loop_vars, MOST_STEPS
    if maximum_iterations is not None:
        most = min(most, int(_find_known(maximum_iterations)))
    for _ in range(most):
        if not _find_known(cond(*state)):
            return state
        state = body(*state)
        state = state if isinstance(state, (list, tuple)) else (state,)
    if maximum_iterations is None and _find_known(cond(*state)):
        raise NotKnown
    return state


def _find_known(x: Any) -> Any:
    if (value := find_value(x)) is None:
        raise NotKnown
    return value


def _rnn(step_function: Callable[..., Any], inputs: Any, *args: object, **kwargs: object) -> Any:
    flat = tf.nest.flatten(inputs)
    steps = flat[0].shape[0 if kwargs.get("time_major") else 1]
    if any(map(is_symbolic, flat)) and len(args) < 5 and steps in range(1, MOST_STEPS + 1):
        kwargs["unroll"] = True
    return _RNN(step_function, inputs, *args, **kwargs)


_RNN = keras.backend.rnn


class _Steps:
    """Replacement for `tf.TensorArray` that stores symbolic tensors."""

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors

    def write(self, index: Any, value: Any, name: str | None = None) -> _Steps:
        index = int(_find_known(index))
        tensors = [*self.tensors, *[None] * (index + 1 - len(self.tensors))]
        tensors[index] = value
        return _Steps(tensors)

    def read(self, index: Any, name: str | None = None) -> Any:
        return self.tensors[int(_find_known(index))]

    def size(self, name: str | None = None) -> tf.Tensor:
        return tf.constant(len(self.tensors))

    def unstack(self, value: Any, name: str | None = None) -> _Steps:
        return _Steps(tf.unstack(value))

    def stack(self, name: str | None = None) -> tf.Tensor:
        return tf.stack(self.tensors)

    def concat(self, name: str | None = None) -> tf.Tensor:
        return tf.concat(self.tensors, 0)

    def gather(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.stack([self.tensors[index] for index in np.asarray(_find_known(indices))])

    def mark_used(self) -> None:
        pass


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "scan": _scan,
    "map_fn": _map,
    "vectorized_map": _map,
    "while_loop": _while_loop,
    "cond": lambda pred, true_fn, false_fn, name=None: (
        true_fn() if _find_known(pred) else false_fn()
    ),
    "TensorArray": lambda *args, **kwargs: _Steps([]),
}
"""Maps names of functions in `tf` to their replacements."""
