"""Recurrent layers in a form that TFLite's converter takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def rnn(
    step_function: Callable[[Any, Any], tuple[Any, Any]],
    inputs: Any,
    initial_states: Any,
    go_backwards: bool = False,
    mask: Any = None,
    constants: Any = None,
    unroll: bool = False,
    input_length: Any = None,
    time_major: bool = False,
    zero_output_for_mask: bool = False,
    return_all_outputs: bool = True,
) -> tuple[Any, Any, Any]:
    """Computes what `keras.backend.rnn` does, without its lists of tensors.

    The converter takes such lists for one batch size only. Arguments and results are those of
    `keras.backend.rnn`, which all of Keras' recurrent layers are computed with.
    """
    to_front = lambda x: tf.transpose(x, [1, 0, *range(2, len(x.shape))])  # noqa: E731
    if not time_major:
        inputs = tf.nest.map_structure(to_front, inputs)
        mask = None if mask is None else to_front(mask)
    if mask is not None and mask.dtype != tf.bool:
        mask = tf.cast(mask, tf.bool)
    sequence = tf.nest.flatten(inputs)[0]
    steps = sequence.shape[0] if sequence.shape[0] is not None else tf.shape(sequence)[0]

    def step(position: Any, states: Any, before: Any) -> tuple[Any, Any]:
        """Computes the output and states of a step; `before` is the output of the step before."""
        # Not a slice, of which older converters know five axes at most.
        x = tf.nest.map_structure(lambda x: tf.gather(x, position), inputs)
        output, new_states = step_function(x, (*states, *(constants or ())))
        new_states = tf.nest.pack_sequence_as(states, tf.nest.flatten(new_states))
        if mask is None:
            return output, new_states
        valid = mask[position]
        hidden = tf.nest.map_structure(tf.zeros_like, output)
        if before is not None and not zero_output_for_mask:
            hidden = before
        return _choose(valid, output, hidden), _choose(valid, new_states, states)

    states = tuple(initial_states)
    if isinstance(steps, int) and (unroll or steps == 1):
        last, outputs, states = _step_by_step(step, steps, states, go_backwards)
    else:
        last, outputs, states = _in_a_loop(step, steps, states, go_backwards, return_all_outputs)
    if not return_all_outputs or outputs is None:
        outputs = tf.nest.map_structure(lambda y: y[None], last)
    if not time_major:
        outputs = tf.nest.map_structure(to_front, outputs)
    return last, outputs, states


def _step_by_step(step: Any, steps: int, states: Any, backwards: bool) -> tuple[Any, Any, Any]:
    output, outputs = None, []
    for position in range(steps):
        output, states = step(steps - 1 - position if backwards else position, states, output)
        outputs.append(output)
    return output, tf.nest.map_structure(lambda *y: tf.stack(y), *outputs), states


def _in_a_loop(
    step: Any, steps: Any, states: Any, backwards: bool, all_outputs: bool
) -> tuple[Any, Any, Any]:
    position_of = lambda count: steps - 1 - count if backwards else count  # noqa: E731
    # The first step outside of the loop: it tells the shapes of the outputs.
    first, states = step(position_of(0), states, None)
    shapes = tf.nest.map_structure(lambda x: x.shape, (first, states))
    empty = tf.nest.map_structure(
        lambda y: tf.zeros(tf.concat([[steps], tf.shape(y)], 0), y.dtype), first
    )

    def store(outputs: Any, output: Any, count: Any) -> Any:
        def one(stored: Any, new: Any) -> Any:
            here = tf.range(steps) == count
            here = tf.reshape(here, [-1, *[1] * len(new.shape)])
            return tf.where(here, new[None], stored)

        return tf.nest.map_structure(one, outputs, output)

    def body(count: Any, output: Any, states: Any, *outputs: Any) -> Any:
        output, states = step(position_of(count), states, output)
        return (count + 1, output, states, *(store(stored, output, count) for stored in outputs))

    outputs = (store(empty, first, 0),) if all_outputs else ()
    invariants = tf.nest.map_structure(
        lambda y: tf.TensorShape([None, *y.shape.as_list()[1:]]), outputs
    )
    _, last, states, *outputs = tf.while_loop(
        lambda count, *_: count < steps,
        body,
        (1, first, states, *outputs),
        shape_invariants=(tf.TensorShape([]), *shapes, *invariants),
    )
    return last, outputs[0] if all_outputs else None, states


def _choose(valid: Any, new: Any, old: Any) -> Any:
    """Returns `new` for examples where the step is valid and `old` for others, tensor by tensor."""

    def one(new: Any, old: Any) -> Any:
        return tf.where(tf.reshape(valid, [-1, *[1] * (len(new.shape) - 1)]), new, old)

    return tf.nest.map_structure(one, new, old)
