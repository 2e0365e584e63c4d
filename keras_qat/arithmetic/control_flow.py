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
    """A condition on ranges and weights. Its value is known while a graph is traced.

    If the value changes later, the graph must be traced again.

    Args:
        value: the value during tracing.
        tensor: the value for the ranges and weights when the graph runs.
        is_taken: True if `value` selected a branch of the graph during tracing.
    """

    value: bool
    tensor: tf.Tensor
    is_taken: bool = False


class Switch(NamedTuple):
    """A condition for which `cond` computes both branches, and selects one result.

    It runs a little slower than `tf.cond`, but is traced much faster.
    """

    on: tf.Tensor


Predicate: TypeAlias = bool | tf.Tensor | Choice | Switch
"""A condition for `cond`."""


def make_switch(predicate: Predicate) -> Predicate:
    """Returns a `Switch` if `predicate` is a tensor of a graph, otherwise `predicate`.

    Use it for branches of few operations, because a `Switch` computes both branches.
    """
    is_symbolic = tf.is_tensor(predicate) and not tf.executing_eagerly()
    return Switch(predicate) if is_symbolic else predicate


def cond(predicate: Predicate, true_fn: Callable[[], T], false_fn: Callable[[], T]) -> T:
    """Returns `true_fn()` if `predicate`, else `false_fn()`.

    If the value of `predicate` is unknown while tracing, `tf.cond` is used. The gradient of
    `tf.cond` is slow to trace. For many conditions, use `tf.custom_gradient`.
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
    """Returns `x` if the scalar tensor `on` is true, else `y`. Copies less than `tf.where`."""
    return tf.raw_ops.Select(condition=on, x=x, y=y)


def straight_through(function: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Computes `function(x)` with the gradient of the identity (Bengio et al. 2013)."""

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
    """Computes `function(*inputs)` with the gradient of `other(owner, *inputs)`.

    `other` is only called for a gradient. It must not reference a model, because TensorFlow keeps
    gradient functions until the process ends. `owner` may be a model.
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
    """Wraps a function of tensors. Each call then adds only one operation to a graph.

    `function` is traced once for each combination of non-tensor arguments. Tracing for every layer
    of a model would delay the first training step by minutes.

    Args:
        function: a function without state.
        signature: `tf.TensorSpec`s of the arguments, if sizes of arguments differ between calls.
        in_line: True to copy the function's operations into the calling graphs instead.
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
