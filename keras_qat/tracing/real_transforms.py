"""Fourier transforms of real numbers, which do not take Keras' symbolic tensors by themselves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_qat.graph.tf_operations import operation_class
from keras_qat.keras2.backend import is_symbolic, patched

NAMES = ("rfft", "rfft2d", "rfft3d", "irfft", "irfft2d", "irfft3d")


@contextlib.contextmanager
def transforms_of_symbols() -> Iterator[None]:
    """Runs a block in which `tf.signal.rfft` and the like take symbolic tensors."""
    with patched(tf.signal, **{name: _of_symbols(getattr(tf.signal, name)) for name in NAMES}):
        yield


def _of_symbols(transform: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(transform)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_symbols = any(map(is_symbolic, tf.nest.flatten((args, kwargs))))
        return (operation_class()(transform) if on_symbols else transform)(*args, **kwargs)

    return call
