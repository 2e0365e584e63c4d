"""Loops and branches of TensorFlow that are written out while a layer is traced."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras, patch_members
from keras_qat.tracing.concrete_sizes import find_value
from keras_qat.tracing.mapped_examples import NotKnown, map_examples

MOST_STEPS = 32
"""The most steps that are unrolled: each of a recurrent layer becomes some twenty calls."""


@contextlib.contextmanager
def unroll_loops() -> Iterator[None]:
    """Runs a block in which loops over a known number of symbolic steps are no loops.

    These are `tf.scan`, `tf.foldl`, `tf.foldr`, `tf.map_fn`, `tf.vectorized_map`, `tf.while_loop`
    and `K.rnn`. `tf.cond` takes its branch if sizes alone say which, and a `tf.TensorArray` is a
    list.
    """
    functions: dict[str, Callable[..., Any]] = {
        "scan": _scan,
        "foldl": _foldl,
        "foldr": _foldr,
        "map_fn": _map,
        "vectorized_map": _map,
        "while_loop": _while_loop,
        "cond": _cond,
        "TensorArray": _tensor_array,
    }
    of_keras: Any = inspect.getmodule(keras.backend.rnn)
    modules = tf, tf.compat.v1, of_keras.tf, of_keras.tf.compat.v1
    found = [
        {
            n: _or_as_before(functions[n], getattr(module, n))
            for n in functions
            if hasattr(module, n)
        }
        for module in modules
    ]
    with contextlib.ExitStack() as block:
        for module, members in zip(modules, found, strict=True):
            block.enter_context(patch_members(module, **members))
        block.enter_context(patch_members(keras.backend, rnn=_rnn))
        block.enter_context(patch_members(of_keras, rnn=_rnn))
        yield


def _or_as_before(new: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls another one where the new one does not know how.

    Layers inside are built in graphs, where nothing changes.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(NotKnown):
            if tf.executing_eagerly():
                return new(*args, **kwargs)
        return before(*args, **kwargs)

    return called


def _rows(elems: Any) -> list[Any]:
    """Returns the steps of tensors."""
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
    *args: Any,
    reverse: bool = False,
    **kwargs: Any,
) -> Any:
    if args:
        raise NotKnown
    rows = _rows(elems)
    rows = rows[::-1] if reverse else rows
    states = [rows.pop(0) if initializer is None else initializer]
    for row in rows:
        states.append(fn(states[-1], row))
    states = states if initializer is None else states[1:]
    return tf.nest.map_structure(lambda *x: tf.stack(x[::-1] if reverse else x), *states)


def _foldl(
    fn: Callable[[Any, Any], Any], elems: Any, initializer: Any = None, **kwargs: Any
) -> Any:
    return _last_state(fn, _rows(elems), initializer)


def _foldr(
    fn: Callable[[Any, Any], Any], elems: Any, initializer: Any = None, **kwargs: Any
) -> Any:
    return _last_state(fn, _rows(elems)[::-1], initializer)


def _last_state(fn: Callable[[Any, Any], Any], rows: list[Any], state: Any) -> Any:
    state = rows.pop(0) if state is None else state
    for row in rows:
        state = fn(state, row)
    return state


def _map(fn: Callable[[Any], Any], elems: Any, *args: Any, **kwargs: Any) -> Any:
    if tf.nest.flatten(elems)[0].shape[:1] == [None]:
        return map_examples(fn, elems)
    results = list(map(fn, _rows(elems)))
    return tf.nest.map_structure(lambda *x: tf.stack(x), *results)


def _while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    *args: Any,
    maximum_iterations: Any = None,
    **kwargs: Any,
) -> Any:
    state, most = loop_vars, MOST_STEPS
    if maximum_iterations is not None:
        most = min(most, int(_number(maximum_iterations)))
    for _ in range(most):
        if not _number(cond(*state)):
            return state
        state = body(*state)
        state = state if isinstance(state, (list, tuple)) else (state,)
    if maximum_iterations is None and _number(cond(*state)):
        raise NotKnown
    return state


def _cond(pred: Any, true_fn: Any = None, false_fn: Any = None, name: Any = None) -> Any:
    return (true_fn if _number(pred) else false_fn)()


def _number(x: Any) -> Any:
    if (number := find_value(x)) is None:
        raise NotKnown
    return number


def _rnn(step_function: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Unrolls `K.rnn` over a known number of steps."""
    is_symbolic = any(map(keras.backend.is_keras_tensor, tf.nest.flatten(inputs)))
    steps = tf.nest.flatten(inputs)[0].shape[0 if kwargs.get("time_major") else 1]
    if is_symbolic and len(args) < 5 and steps in range(1, MOST_STEPS + 1):
        kwargs["unroll"] = True
    return _RNN(step_function, inputs, *args, **kwargs)


_RNN = keras.backend.rnn


def _tensor_array(*args: Any, **kwargs: Any) -> _Steps:
    return _Steps([])


class _Steps:
    """A `tf.TensorArray` of symbolic tensors."""

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors

    def write(self, index: Any, value: Any, name: Any = None) -> _Steps:
        index = int(_number(index))
        missing = [None] * (index + 1 - len(self.tensors))
        tensors = [*self.tensors, *missing]
        tensors[index] = value
        return _Steps(tensors)

    def read(self, index: Any, name: Any = None) -> Any:
        return self.tensors[int(_number(index))]

    def size(self, name: Any = None) -> Any:
        return tf.constant(len(self.tensors))

    def unstack(self, value: Any, name: Any = None) -> _Steps:
        return _Steps(tf.unstack(value))

    def stack(self, name: Any = None) -> Any:
        return tf.stack(self.tensors)

    def concat(self, name: Any = None) -> Any:
        return tf.concat(self.tensors, 0)

    def gather(self, indices: Any, name: Any = None) -> Any:
        return tf.stack([self.tensors[index] for index in np.asarray(_number(indices))])

    def mark_used(self) -> None:
        pass
