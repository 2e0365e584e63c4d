"""Conditions in graphs, and functions with a custom gradient."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Choice:
    """A condition on variables, such as `scale == 2**-12`. `cond` traces only one branch.

    If `tensor` later differs from `value`, the graph must be traced again.

    Args:
        value: the condition during tracing. It selects the branch.
        tensor: the condition, computed in the graph from the current values of the variables.
        is_taken: True if `cond` has used `value`.
    """

    value: bool
    tensor: tf.Tensor
    is_taken: bool = False


class Switch(NamedTuple):
    """A condition for which `cond` computes both branches, and then selects one of the results.

    Such a graph runs a little slower than one with `tf.cond`, but is traced much faster.
    """

    on: tf.Tensor


Predicate: TypeAlias = bool | tf.Tensor | Choice | Switch


def make_switch(predicate: Predicate) -> Predicate:
    """Converts a tensor of a graph to a `Switch`. Returns other conditions unchanged.

    Use it for branches with few operations, because a `Switch` computes both branches.
    """
    is_symbolic = tf.is_tensor(predicate) and not tf.executing_eagerly()
    return Switch(predicate) if is_symbolic else predicate


def cond(predicate: Predicate, true_fn: Callable[[], T], false_fn: Callable[[], T]) -> T:
    """Returns `true_fn()` if `predicate`, else `false_fn()`.

    For a symbolic tensor, it calls `tf.cond`. The gradient of `tf.cond` is slow to trace.
    """
    if isinstance(predicate, Choice):
        predicate.is_taken, predicate = True, predicate.value
    if isinstance(predicate, tf.__internal__.EagerTensor):
        predicate = bool(predicate)
    if isinstance(predicate, Switch):
        return tf.nest.map_structure(functools.partial(select, predicate.on), true_fn(), false_fn())
    if isinstance(predicate, bool):
        return true_fn() if predicate else false_fn()
    return tf.cond(predicate, true_fn, false_fn)


def select(on: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns `x` if the scalar `on` is true, else `y`. Needs less memory than `tf.where`."""
    return tf.raw_ops.Select(condition=on, x=x, y=y)


def straight_through(function: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Computes `function(x)`, with a gradient of 1 (straight-through estimator)."""

    @tf.custom_gradient
    def compute(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return function(x), lambda upstream: upstream

    return compute(x)


def replace_gradient(
    function: Callable[..., list[tf.Tensor]],
    owner: object,
    other: Callable[..., list[tf.Tensor]],
    inputs: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Computes `function(*inputs)`. The gradient is that of `other(owner, *inputs)`.

    TensorFlow never frees a gradient function. If `other` referred to a model, the model would
    therefore never be freed. Pass the model as `owner` instead: only a weak reference is kept.
    """
    owned_by = weakref.ref(owner)

    @tf.custom_gradient
    def compute(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def gradient(*upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> object:
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = other(owned_by(), *inputs)
            gradients = tape.gradient(outputs, [*inputs, *variables], list(upstream))
            first, rest = gradients[: len(inputs)], gradients[len(inputs) :]
            return (first, rest) if variables else first

        return [tf.stop_gradient(output) for output in function(*inputs)], gradient

    return list(compute(*inputs))


def trace_once(
    function: Callable[..., T],
    signature: Sequence[tf.TensorSpec] | None = None,
    in_line: bool = False,
) -> Callable[..., T]:
    """Wraps a function in a `tf.function` that many layers share.

    Each call in a graph adds one operation that calls the traced function. Tracing it again for
    each layer of a model would delay the first training step by minutes.

    Args:
        function: a function of tensors that uses no variables.
        signature: the `input_signature` of `tf.function`, if shapes differ between calls.
        in_line: True to let TensorFlow copy the function's operations into graphs that call it.
    """
    traced = tf.function(
        function,
        input_signature=signature,
        autograph=False,
        experimental_attributes={} if in_line else {"_noinline": True},
    )

    @functools.wraps(function)
    def call(*args: object) -> T:
        # In eager mode, a few small operations are faster than calling a traced function.
        return function(*args) if tf.executing_eagerly() and not signature else traced(*args)

    return call
