"""Random numbers that code draws while a layer is traced: noise, and layers dropped by hand."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import is_symbolic, patch_members


@contextlib.contextmanager
def largest_draws() -> Iterator[None]:
    """Runs a block in which `random` and `numpy.random` draw the largest of their numbers.

    A graph has what was drawn as it was traced, for good. With the largest, `LayerDrop` leaves
    nothing out: `if training and np.random.uniform(0, 1) < self.layerdrop: continue`.
    """

    def uniform(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        return high if size is None else drawn(low, high, size)

    def unit(*sizes: Any, **options: Any) -> Any:
        return drawn(size=sizes or options.get("size")) if sizes or options else 1.0

    drawn = np.random.uniform
    numpy_names = "random", "rand", "random_sample"
    with (
        patch_members(random, uniform=uniform, random=unit),
        patch_members(np.random, uniform=uniform, **dict.fromkeys(numpy_names, unit)),
    ):
        yield


@contextlib.contextmanager
def draws_in_each_step(x: Any) -> Iterator[None]:
    """Runs a block in which TensorFlow draws random numbers in each step, not once for all.

    It draws as it is called where no argument is symbolic, as in `tf.random.normal(w.shape)`.

    Args:
        x: a symbolic tensor.
    """

    def in_each_step(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(shape: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(shape, (list, tuple)):  # An open size, as of x.shape[0], is the batch's.
                shape = [tf.shape(x)[0] if size is None else size for size in shape]
            is_known = not any(map(is_symbolic, tf.nest.flatten((shape, args, kwargs))))
            if not is_known or not tf.executing_eagerly():  # Inner layers are called in a graph.
                return draw(shape, *args, **kwargs)
            sizes = tf.cast(tf.convert_to_tensor(shape), tf.int32)
            return tf.reshape(draw(sizes + 0 * tf.shape(x)[0], *args, **kwargs), sizes)

        return drawn

    draws = {name: in_each_step(getattr(tf.random, name)) for name in _DRAWS}
    with (
        patch_members(tf.random, **draws),
        patch_members(tf.compat.v2.random, **draws),
        _masks_of_symbols(),
    ):
        yield


_DRAWS = "normal", "uniform", "truncated_normal"


@contextlib.contextmanager
def _masks_of_symbols() -> Iterator[None]:
    """Runs a block in which TensorFlow's Bernoulli distribution draws by `tf.random.uniform`.

    Its own way takes no symbolic sizes. DeBERTa drops by such masks.
    """
    kind = tf.compat.v1.distributions.Bernoulli
    before = kind.sample

    def sample(mask: Any, sample_shape: Any = (), *args: Any, **kwargs: Any) -> Any:
        if mask.batch_shape.rank != 0 or not tf.executing_eagerly():
            return before(mask, sample_shape, *args, **kwargs)
        return tf.cast(tf.random.uniform(sample_shape) < float(mask.probs), mask.dtype)

    with patch_members(kind, sample=sample):
        yield
