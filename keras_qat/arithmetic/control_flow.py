"""Branches that training takes at run time, and their gradients."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


@dataclasses.dataclass(eq=False)
class Choice:
    """A condition on ranges and weights, known while a graph is traced for them.

    Args:
        value: whether it is true now.
        tensor: the same in the graph, true or false as ranges and weights go on changing.
        is_taken: whether the graph holds for this value alone.
    """

    value: bool
    tensor: Any
    is_taken: bool = False


class Switch(NamedTuple):
    """A condition that selects one of two results, which are both computed.

    A selection takes a little longer than a branch to run, and much less to trace.

    Args:
        on: a scalar tensor.
    """

    on: Any


def make_switch(predicate: Any) -> Any:
    """Returns a predicate with which `cond` selects, if it is a tensor of a graph.

    For branches of few operations, in place of a `tf.cond` with two graphs of its own.
    """
    is_symbolic = tf.is_tensor(predicate) and not tf.executing_eagerly()
    return Switch(predicate) if is_symbolic else predicate


def cond(predicate: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """Calls `tf.cond`, or the branch at once if `predicate` is known while tracing.

    The gradient of a `tf.cond` takes long to trace: where there are many, give them one by
    `tf.custom_gradient`.

    Args:
        predicate: a bool, a scalar tensor, which is known if no graph computes it, a `Choice` or
            a `Switch`.
        true_fn, false_fn: the branches.
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


def select(on: Any, x: Any, y: Any) -> Any:
    """Returns `x` if the scalar tensor `on` is true, else `y`, of the same shape and type.

    This operation passes one of the two on. That of `tf.where` copies, element by element.
    """
    return tf.raw_ops.Select(condition=on, x=x, y=y)


def straight_through(function: Callable[[Any], Any], x: Any) -> Any:
    """Computes `function(x)` with the gradient of `x` (Bengio et al. 2013)."""

    @tf.custom_gradient
    def passes(x: Any) -> Any:
        return function(x), lambda upstream: upstream

    return passes(x)


def replace_gradient(
    function: Callable[..., list[Any]], owner: Any, other: Callable[..., list[Any]], inputs: Any
) -> list[Any]:
    """Computes `function(*inputs)` with the gradient of `other(owner, *inputs)`.

    The gradient is computed if asked for. Both functions return a list of tensors. TensorFlow keeps
    gradients of graphs for as long as the process runs: `other` must not hold a model, the `owner`
    may be one.
    """
    owned_by = weakref.ref(owner)

    @tf.custom_gradient
    def replaced(*inputs: Any) -> Any:
        def gradient(*upstream: Any, variables: Any = ()) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = other(owned_by(), *inputs)
            gradients = tape.gradient(outputs, [*inputs, *variables], list(upstream))
            first, rest = gradients[: len(inputs)], gradients[len(inputs) :]
            return (first, rest) if variables else first

        return [tf.stop_gradient(output) for output in function(*inputs)], gradient

    return list(replaced(*inputs))


def trace_once(function: Callable[..., Any], signature: Any = None, in_line: bool = False) -> Any:
    """Makes a function of tensors one operation of the graphs that call it.

    It is traced and optimized once, or once for each combination of other arguments, instead of for
    each layer of a model: with its many operations in line, the first step would take minutes.

    Args:
        function: without state.
        signature: `tf.TensorSpec`s of the arguments, if their sizes differ from call to call.
        in_line: whether graphs run its operations as their own.
    """
    traced = tf.function(
        function,
        input_signature=signature,
        autograph=False,
        experimental_attributes={} if in_line else {"_noinline": True},
    )

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        # By itself, a few small operations take less time than the call of a function.
        return function(*args) if tf.executing_eagerly() and not signature else traced(*args)

    return called
