"""Functions of TensorFlow that Keras does not record as one operation by itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_qat.graph.operations import operation_class
from keras_qat.keras2.backend import is_symbolic, keras, patch_members
from keras_qat.tracing.concrete_sizes import asked_by_user

NAMES = ("rfft", "rfft2d", "rfft3d", "irfft", "irfft2d", "irfft3d")


@contextlib.contextmanager
def record_transforms() -> Iterator[None]:
    """Runs a block in which `tf.signal.rfft` and the like take symbolic tensors."""
    with patch_members(
        tf.signal, **{name: _of_symbols(getattr(tf.signal, name)) for name in NAMES}
    ):
        yield


def _of_symbols(transform: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(transform)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_symbols = any(map(is_symbolic, tf.nest.flatten((args, kwargs))))
        return (operation_class()(transform) if on_symbols else transform)(*args, **kwargs)

    return call


@contextlib.contextmanager
def run_functions_eagerly() -> Iterator[None]:
    """Runs a block in which `tf.function` calls Python, as it takes no symbolic tensors."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def deny_eager_execution() -> Iterator[None]:
    """Runs a block in which a user's code is told that it runs in a graph, as in a Keras model."""
    is_eager = tf.executing_eagerly

    def executing_eagerly() -> bool:
        return is_eager() and not asked_by_user("keras_qat")

    with patch_members(tf, executing_eagerly=executing_eagerly):
        yield


@contextlib.contextmanager
def skip_assertions() -> Iterator[None]:
    """Runs a block in which TensorFlow's assertions, which want numbers, pass all."""

    def passed_on(x: Any = None, *args: Any, **kwargs: Any) -> Any:
        return x

    names = [name for name in dir(tf.debugging) if name.startswith("assert_")]
    with patch_members(tf.debugging, **dict.fromkeys(names, passed_on)):
        yield


@contextlib.contextmanager
def convolutions_at_once() -> Iterator[None]:
    """Runs a block in which `tf.nn.convolution` of a sequence is `tf.nn.conv1d`.

    With gaps it would be a convolution between two operations that move steps, none of which says
    what it is for. Keras calls it in another module than users do.
    """
    convolution = tf.nn.convolution

    def at_once(
        input: Any,
        filters: Any,
        strides: Any = None,
        padding: Any = "VALID",
        data_format: Any = None,
        dilations: Any = None,
        name: Any = None,
    ) -> Any:
        options = 1 if strides is None else strides, padding
        if isinstance(input, _SYMBOL) and len(input.shape) == 3 and data_format in (None, "NWC"):
            return tf.nn.conv1d(input, filters, *options, dilations=dilations, name=name)
        return convolution(input, filters, strides, padding, data_format, dilations, name)

    modules = tf.nn, tf.compat.v2.nn
    with contextlib.ExitStack() as block:
        for module in modules:
            block.enter_context(patch_members(module, convolution=at_once))
        yield


class _AnyTensor(type):
    """Says of symbolic tensors that they are tensors, too."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, (_TENSOR, _SYMBOL))


_TENSOR, _SYMBOL = tf.Tensor, type(keras.Input((1,)))


@contextlib.contextmanager
def count_symbols_as_tensors() -> Iterator[None]:
    """Runs a block in which checks of types take symbolic tensors for tensors, as Keras gives them.

    TensorFlow and Keras themselves look up their types elsewhere.
    """
    is_tensor = tf.is_tensor
    with patch_members(
        tf,
        Tensor=_AnyTensor("Tensor", (), {}),
        is_tensor=lambda x: is_tensor(x) or isinstance(x, _SYMBOL),
    ):
        yield
