"""Branches that training takes at run time, and their gradients."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.partial_evaluation import decided

__all__ = ["cond", "straight_through", "traced_once", "with_gradient_of"]


def cond(predicate: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """`tf.cond` that takes the branch at once if `predicate` is known while tracing.

    The gradient of a `tf.cond` takes long to trace: where there are many, give them one by
    `tf.custom_gradient`.
    """
    known = decided(predicate)
    if known is not None:
        return true_fn() if known else false_fn()
    return tf.cond(predicate, true_fn, false_fn)


def straight_through(function: Callable[[Any], Any], x: Any) -> Any:
    """`function(x)` with the gradient of `x` (Bengio et al. 2013)."""

    @tf.custom_gradient
    def passes(x: Any) -> Any:
        return function(x), lambda upstream: upstream

    return passes(x)


def with_gradient_of(
    function: Callable[..., list[Any]], owner: Any, other: Callable[..., list[Any]], inputs: Any
) -> list[Any]:
    """`function(*inputs)` with the gradient of `other(owner, *inputs)`, computed if asked for.

    Both give a list of tensors. TensorFlow keeps gradients of graphs for as long as the process
    runs: `other` is not to hold a model, the `owner` may be one.
    """
    owned_by = weakref.ref(owner)

    @tf.custom_gradient
    def replaced(*inputs: Any) -> Any:
        def gradient(*upstream: Any, variables: Any = ()) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = other(owned_by(), *inputs)
            found = tape.gradient(outputs, [*inputs, *variables], list(upstream))
            first, rest = found[: len(inputs)], found[len(inputs) :]
            return (first, rest) if variables else first

        return [tf.stop_gradient(each) for each in function(*inputs)], gradient

    return list(replaced(*inputs))


def traced_once(function: Callable[..., Any], signature: Any = None) -> Any:
    """A function of tensors as one operation of the graphs that call it.

    Traced and optimized once, or once for each combination of other arguments, instead of for
    each layer of a model: with its many operations in line, the first step would take minutes.

    Args:
        function: without state.
        signature: `tf.TensorSpec`s of the arguments, if their sizes differ from call to call.
    """
    traced = tf.function(
        function,
        input_signature=signature,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        # By itself, a few small operations take less time than the call of a function.
        return function(*args) if tf.executing_eagerly() and not signature else traced(*args)

    return called
