"""Loops that TensorFlow would run one step at a time, written out while a layer is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_qat.frontend.keras2.backend import keras, swapped

MOST_STEPS = 32


@contextlib.contextmanager
def steps_written_out() -> Iterator[None]:
    """Runs a block in which `tf.scan` over a known number of symbolic steps is no loop."""
    loop = tf.scan

    def scan(
        fn: Callable[[Any, Any], Any],
        elems: Any,
        initializer: Any = None,
        *args: Any,
        reverse: bool = False,
        **kwargs: Any,
    ) -> Any:
        flat = tf.nest.flatten(elems)
        steps = flat[0].shape[:1].as_list() if all(map(tf.is_tensor, flat)) else [None]
        read = tf.nest.flatten((elems, initializer))
        is_symbolic = any(map(keras.backend.is_keras_tensor, read))
        if args or not is_symbolic or steps[0] not in range(1, MOST_STEPS + 1):
            return loop(fn, elems, initializer, *args, reverse=reverse, **kwargs)
        columns = [tf.unstack(x, steps[0]) for x in flat]
        rows = [tf.nest.pack_sequence_as(elems, row) for row in zip(*columns, strict=True)]
        rows = rows[::-1] if reverse else rows
        states = [rows.pop(0) if initializer is None else initializer]
        for row in rows:
            states.append(fn(states[-1], row))
        states = states if initializer is None else states[1:]
        return tf.nest.map_structure(lambda *x: tf.stack(x[::-1] if reverse else x), *states)

    with swapped(tf, scan=scan):
        yield
