"""Replacements for functions of TensorFlow, NumPy and Python while a layer is traced."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import draws_random_numbers, get_operation_class, name_in_tensorflow
from keras_qat.helper_layers.operations import WithModel
from keras_qat.keras2.backend import KerasTensor, is_symbolic, keras, patch_members, register
from keras_qat.tracing.concrete_sizes import is_called_by_user

_TRANSFORMS = ("rfft", "rfft2d", "rfft3d", "irfft", "irfft2d", "irfft3d")
_DRAWS = ("normal", "uniform", "truncated_normal")
_TENSOR = tf.Tensor


def record_transforms() -> contextlib.AbstractContextManager[None]:
    """Makes `tf.signal.rfft` and similar functions accept symbolic tensors in a `with` block."""

    def record(transform: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(transform)
        def call(*args: object, **kwargs: object) -> Any:
            on_symbols = any(map(is_symbolic, tf.nest.flatten((args, kwargs))))
            return (get_operation_class()(transform) if on_symbols else transform)(*args, **kwargs)

        return call

    transforms = {name: record(getattr(tf.signal, name)) for name in _TRANSFORMS}
    return patch_members(tf.signal, **transforms)


@contextlib.contextmanager
def run_functions_eagerly() -> Iterator[None]:
    """Runs each `tf.function` as Python code in a `with` block. Graphs reject symbolic tensors."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def deny_eager_execution() -> contextlib.AbstractContextManager[None]:
    """Makes `tf.executing_eagerly()` return False to custom code inside a `with` block."""
    is_eager = tf.executing_eagerly

    def executing_eagerly() -> bool:
        return is_eager() and not is_called_by_user("keras_qat")

    return patch_members(tf, executing_eagerly=executing_eagerly)


def skip_assertions() -> contextlib.AbstractContextManager[None]:
    """Disables `tf.debugging.assert_...` in a `with` block. Symbolic tensors have no values."""

    def accept(x: Any = None, *args: object, **kwargs: object) -> Any:
        return x

    names = [name for name in dir(tf.debugging) if name.startswith("assert_")]
    return patch_members(tf.debugging, **dict.fromkeys(names, accept))


@contextlib.contextmanager
def keep_convolutions() -> Iterator[None]:
    """Replaces 1D `tf.nn.convolution` by `tf.nn.conv1d` inside a `with` block.

    With dilations, the trace of `tf.nn.convolution` would also reshape input and output.
    """
    convolution = tf.nn.convolution

    def convolve(
        input: Any,
        filters: Any,
        strides: Any = None,
        padding: str = "VALID",
        data_format: str | None = None,
        dilations: Any = None,
        name: str | None = None,
    ) -> Any:
        is_sequence = isinstance(input, KerasTensor) and len(input.shape) == 3
        if is_sequence and data_format in (None, "NWC"):
            strides = 1 if strides is None else strides
            return tf.nn.conv1d(input, filters, strides, padding, dilations=dilations, name=name)
        return convolution(input, filters, strides, padding, data_format, dilations, name)

    with (
        patch_members(tf.nn, convolution=convolve),
        patch_members(tf.compat.v2.nn, convolution=convolve),
    ):
        yield


class _AnyTensor(type):
    """Metaclass of a class that replaces `tf.Tensor`. Symbolic tensors count as its instances."""

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, (_TENSOR, KerasTensor))


def count_symbols_as_tensors() -> contextlib.AbstractContextManager[None]:
    """Makes `isinstance(x, tf.Tensor)` accept symbolic tensors inside a `with` block.

    Only custom code is affected. TensorFlow and Keras do not look up `tf.Tensor` in `tf`.
    """
    is_tensor = tf.is_tensor
    return patch_members(
        tf,
        Tensor=_AnyTensor("Tensor", (), {}),
        is_tensor=lambda x: is_tensor(x) or isinstance(x, KerasTensor),
    )


@contextlib.contextmanager
def draw_largest() -> Iterator[None]:
    """Makes `random` and `numpy.random` draw the largest number inside a `with` block.

    The largest number keeps layers that custom code skips at random, as in LayerDrop: `if training
    and np.random.uniform(0, 1) < self.layerdrop: continue`.
    """
    draw = np.random.uniform

    def uniform(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        return high if size is None else draw(low, high, size)

    def unit(*sizes: int, **options: Any) -> Any:
        return draw(size=sizes or options.get("size")) if sizes or options else 1.0

    numpy_names = "random", "rand", "random_sample"
    with (
        patch_members(random, uniform=uniform, random=unit),
        patch_members(np.random, uniform=uniform, **dict.fromkeys(numpy_names, unit)),
    ):
        yield


@contextlib.contextmanager
def draw_in_each_step(x: KerasTensor) -> Iterator[None]:
    """Makes TensorFlow's random functions draw in each training step, inside a `with` block.

    They read the batch size of `x`, and are therefore recorded as operations. Otherwise,
    `tf.random.normal((8,))` would be a constant in the trace.
    """

    def draw_anew(draw: Callable[..., Any]) -> Callable[..., Any]:
        def call(shape: Any, *args: object, **kwargs: object) -> Any:
            if isinstance(shape, (list, tuple)):  # `x.shape[0]` may be None.
                shape = [tf.shape(x)[0] if size is None else size for size in shape]
            is_known = not any(map(is_symbolic, tf.nest.flatten((shape, args, kwargs))))
            if not is_known or not tf.executing_eagerly():  # Inner layers are called in a graph.
                return draw(shape, *args, **kwargs)
            sizes = tf.cast(tf.convert_to_tensor(shape), tf.int32)
            return tf.reshape(draw(sizes + 0 * tf.shape(x)[0], *args, **kwargs), sizes)

        return call

    draws = {name: draw_anew(getattr(tf.random, name)) for name in _DRAWS}
    with patch_members(tf.random, **draws), patch_members(tf.compat.v2.random, **draws):
        yield


@register
class OwnGradient(WithModel):
    """Layer that returns its input with another gradient, to trace `tf.custom_gradient`.

    `OwnGradient(model)(y, given=[x])` returns `y`, which was computed from `x`. The gradient of `x`
    is then `model([x, gradient of y])`.
    """

    def call(self, inputs: tf.Tensor, given: Any = None) -> tf.Tensor:
        @tf.custom_gradient
        def apply(y: tf.Tensor, *read: tf.Tensor) -> Any:
            return tf.identity(y), lambda upstream: (
                None,
                *tf.nest.flatten(self.model([*read, upstream])),
            )

        return apply(inputs, *given)

    def operations(self) -> list[Any]:
        """Lists operations and layer classes, to compare the models of two `OwnGradient` layers."""
        return [name_in_tensorflow(layer) or type(layer) for layer in self.model.layers]


@contextlib.contextmanager
def record_custom_gradients() -> Iterator[None]:
    """Makes functions with `tf.custom_gradient` accept symbolic tensors inside a `with` block."""
    module: Any = inspect.getmodule(tf.custom_gradient)
    call_eagerly = module._eager_mode_decorator
    created: list[Any] = []

    def record(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        flat = tf.nest.flatten(args)
        read = [x for x in flat if is_symbolic(x)]
        if not read:
            return call_eagerly(function, args, kwargs)
        y, _ = function(*args, **kwargs)
        symbols = [keras.Input(type_spec=x.type_spec) if is_symbolic(x) else x for x in flat]
        _, gradient = function(*tf.nest.pack_sequence_as(args, symbols), **kwargs)
        upstream = keras.Input(type_spec=y.type_spec)
        results = zip(symbols, tf.nest.flatten(gradient(upstream)), strict=True)
        pairs = [(x, g) for x, g in results if is_symbolic(x)]
        gradients = [tf.zeros_like(x) if g is None else g for x, g in pairs]
        if any(map(draws_random_numbers, _find_layers_before(gradients))):
            return y  # The gradient would draw other values than `function`.
        name = f"own_gradient_{len(created)}" if created else "own_gradient"
        layer = OwnGradient(None, name=name)
        created.append((layer, [*(x for x, _ in pairs), upstream], gradients))
        return layer(y, given=read)

    with patch_members(module, _eager_mode_decorator=record):
        yield
    for layer, *ends in created:  # Inside a `Lambda`, models cannot create variables.
        layer.model = keras.Model(*ends)


def _find_layers_before(tensors: list[Any]) -> Iterator[keras.layers.Layer]:
    waiting, seen = list(tensors), set[int]()
    for tensor in waiting:
        if is_symbolic(tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor._keras_history.layer
            waiting += tensor.node.keras_inputs
