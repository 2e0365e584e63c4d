"""Runs the steps of recurrent layers, with a faster gradient than TensorFlow's loops.

TensorFlow's gradient of a loop stores every tensor of a step, and differentiates every operation in
each step. In a recurrent layer, all operations are elementwise, except for products with recurrent
weights. This module computes the elementwise derivatives for all steps at once. A loop then only
multiplies by the derivatives and the weights.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

Tensors = Mapping[str, Any]

Step = Callable[[Callable[[str, tf.Tensor], Any], Tensors, tuple[Any, ...]], tuple[Any, Any]]
"""A function `(product, values, states)` that computes a time step. It returns the next states, and
a dict of the tensors inside the step that quantizers observe.

The function calls `product(part, states)` to multiply by recurrent weights. If tensors have the
shape [steps, batch, ...], it computes all steps at once."""

Multiply = Callable[..., Any]
"""A function `(part, states, kernel[, bias])` that multiplies by one part of the recurrent
weights."""


def run_steps(
    step: Step,
    multiply: Multiply,
    weights: Mapping[str, Sequence[Any]],
    values: Tensors,
    states: Sequence[Any],
    unroll: bool,
) -> tuple[list[Any], dict[str, list[Any]]]:
    """Runs all steps. Returns the states after each step, and the tensors to observe by name.

    Args:
        step: function that computes a step.
        multiply: function that multiplies states by weights.
        weights: the recurrent weights of each part.
        values: the products of the inputs and the kernel by part, and possibly a mask. The shapes
            are [steps, batch, ...].
        states: the states before the first step.
        unroll: True to unroll the loop over the steps.
    """
    given = {part: values[part] for part in weights}
    arguments = dict(weights), given, tuple(states)
    seen: dict[str, list[Any]] = {}

    @tf.custom_gradient
    def compute(*inputs: tf.Tensor) -> Any:
        weights, given, states = tf.nest.pack_sequence_as(arguments, inputs)
        of_steps = {**values, **given}

        def advance(before: Any, values: Tensors) -> Any:
            products: dict[str, Any] = {}

            def product(part: str, x: tf.Tensor) -> Any:
                products[part] = multiply(part, x, *weights[part])
                return products[part]

            after, _ = step(product, values, before[0])
            return after, products

        none = {part: tf.zeros_like(x[0]) for part, x in given.items()}
        after, products = _scan(advance, of_steps, (states, none), unroll)
        backward = _Backward(step, multiply, weights, of_steps, states, after, products, unroll)
        seen.update(backward.seen)
        count = len(states)
        gradient = lambda *upstream: tf.nest.flatten(backward(upstream[:count]))  # noqa: E731
        return [*after, *tf.nest.flatten(seen)], gradient

    results = compute(*tf.nest.flatten(arguments))
    after, tensors = results[: len(states)], results[len(states) :]
    return after, tf.nest.pack_sequence_as(seen, tensors)


def _scan(
    function: Callable[[Any, Any], Any],
    values: Any,
    start: Any,
    unroll: bool,
    reverse: bool = False,
) -> Any:
    if not unroll:
        return tf.scan(function, values, start, reverse=reverse)
    flat = [tf.unstack(x) for x in tf.nest.flatten(values)]
    steps = [tf.nest.pack_sequence_as(values, own) for own in zip(*flat, strict=True)]
    results = []
    for own in reversed(steps) if reverse else steps:
        start = function(start, own)
        results.append(tf.nest.flatten(start))
    in_order = results[::-1] if reverse else results
    stacked = [tf.stack(tensors) for tensors in zip(*in_order, strict=True)]
    return tf.nest.pack_sequence_as(start, stacked)


class _Backward:
    """The gradient of all steps.

    Between the matrix products, a step is elementwise. The elementwise operations read the previous
    states and the results of products, called sources here. They compute the next states and the
    operands of products, called targets.
    """

    def __init__(
        self,
        step: Step,
        multiply: Multiply,
        weights: Mapping[str, Sequence[Any]],
        values: Tensors,
        states: Sequence[Any],
        after: Sequence[Any],
        products: Tensors,
        unroll: bool,
    ) -> None:
        self.multiply, self.weights, self.unroll = multiply, weights, unroll
        self.given = {part: values[part] for part in products}
        self.zeros = tf.zeros_like(states[0])
        before = [tf.concat([x[None], own[:-1]], 0) for x, own in zip(states, after, strict=True)]
        self.names = [f"state_{index}" for index in range(len(states))]
        self.sources = {**dict(zip(self.names, before, strict=True)), **products}
        self.operands: dict[str, Any] = {}

        def recall(part: str, x: tf.Tensor) -> Any:
            self.operands[part] = x
            return products[part]

        with tf.GradientTape(persistent=True) as self.tape:
            self.tape.watch((self.sources, self.given))
            again, self.seen = step(recall, values, tuple(before))
        # The derivative of an operand that is the first state itself is 1.
        self.is_state = {part for part, x in self.operands.items() if x is before[0]}
        others = {part: x for part, x in self.operands.items() if part not in self.is_state}
        self.targets = {**dict(zip(self.names, again, strict=True)), **others}

    def __call__(self, upstream: Sequence[Any]) -> Any:
        """Returns the gradients of the weights, of the input products, and of the first states."""
        slopes: dict[tuple[str, str], Any] = {}
        slopes_of_given: dict[tuple[str, str], Any] = {}
        for name, target in self.targets.items():
            found = self.tape.gradient(target, (self.sources, self.given))
            for group, own in zip(found, (slopes, slopes_of_given), strict=True):
                own |= {(name, source): x for source, x in group.items() if x is not None}

        def retreat(after: Any, at_step: Any) -> Any:
            upstream, slopes = at_step
            of = {name: x + after[0][name] for name, x in upstream.items()}
            for part in reversed(self.operands):
                of[part] = self._multiply_back(part, _propagate(of, slopes, part))
            before = {name: _propagate(of, slopes, name) for name in self.names}
            for part in self.is_state:
                own = before[self.names[0]]
                before[self.names[0]] = of[part] if own is None else own + of[part]
            return before, {name: of[name] for name in self.targets}

        start = tuple(dict.fromkeys(names, self.zeros) for names in (self.names, self.targets))
        of_steps = dict(zip(self.names, upstream, strict=True)), slopes
        of_first, of = _scan(retreat, of_steps, start, self.unroll, reverse=True)
        return (
            {part: self._find_weights(part, _propagate(of, slopes, part)) for part in self.weights},
            {part: _propagate(of, slopes_of_given, part) for part in self.given},
            tuple(of_first[name][0] for name in self.names),
        )

    def _multiply_back(self, part: str, upstream: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(self.zeros)
            y = self.multiply(part, self.zeros, *self.weights[part])
        return tape.gradient(y, self.zeros, upstream)

    def _find_weights(self, part: str, upstream: tf.Tensor) -> Any:
        """Return the gradients of the weights of a part, for all steps together."""
        with tf.GradientTape() as tape:
            tape.watch(self.weights[part])
            y = self.multiply(part, self.operands[part], *self.weights[part])
        return tape.gradient(y, self.weights[part], upstream)


def _propagate(of: Tensors, slopes: Mapping[tuple[str, str], Any], source: str) -> Any:
    """Return the gradient of a source from the gradients `of` targets, or None if unused."""
    terms = []
    for (target, own), slope in slopes.items():
        if own == source:
            blocks = slope.shape[-1] // of[target].shape[-1]
            repeated = of[target] if blocks == 1 else tf.concat([of[target]] * blocks, -1)
            terms.append(repeated * slope)
    return functools.reduce(operator.add, terms) if terms else None
