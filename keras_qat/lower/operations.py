"""Lowering of TensorFlow operations on symbolic tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.backend import keras
from keras_qat.graph import Call, Value, is_operation, number, operands, values_in
from keras_qat.inner_layers import Roll
from keras_qat.lower.activations import split_swish
from keras_qat.lower.attention import split_einsum
from keras_qat.lower.merges import convert_fixed_ranges
from keras_qat.lower.parts import Lowering, Made, between, path

__all__ = ["OPERATIONS"]

_layers = keras.layers


def _split_silu(call: Call, made: Made) -> list[Call]:
    (_, beta) = operands(call, "features", "beta")
    return split_swish(call, made) if beta in (None, 1.0) else []


def _split_negative(call: Call, made: Made) -> list[Call]:
    """-x -> Rescaling(-1)."""
    return [_rescaling(call, made, -1.0)]


def _split_division(call: Call, made: Made) -> list[Call]:
    """x / number -> Rescaling(1 / number)."""
    x, divisor = operands(call, "x", "y")
    divisor = number(divisor)
    if not isinstance(x, Value) or not divisor:
        return []
    return [_rescaling(call, made, 1.0 / divisor)]


def _rescaling(call: Call, made: Made, scale: float) -> Call:
    layer = call.layer
    rescaling = made.layer(layer, "scale", lambda: _layers.Rescaling(scale, name=layer.name))
    return Call(rescaling, (call.inputs[0],), {}, call.output, call.name)


def _split_square(call: Call, made: Made) -> list[Call]:
    """The square of a tensor -> Multiply of it and itself."""
    x = call.inputs[0]
    multiply = made.layer(call.layer, "multiply", lambda: _layers.Multiply(name=call.layer.name))
    return [Call(multiply, ([x, x],), {}, call.output, call.name)] if x.is_float else []


def _split_power(call: Call, made: Made) -> list[Call]:
    """x ** 2 -> Multiply."""
    x, exponent = operands(call, "x", "y")
    is_square = isinstance(x, Value) and number(exponent) == 2
    return _split_square(call, made) if is_square else []


def _split_add_n(call: Call, made: Made) -> list[Call]:
    """tf.add_n -> Add."""
    add = made.layer(call.layer, "add", lambda: _layers.Add(name=call.layer.name))
    (tensors,) = operands(call, "inputs")
    if len(tensors) < 2 or len(call.inputs) != len(tensors):
        return []
    return [Call(add, (list(tensors),), {}, call.output, call.name)]


def _split_cast(call: Call, made: Made) -> list[Call]:
    """tf.cast to the type that a tensor has -> a linear activation, which is nothing."""
    layer, (x,) = call.layer, call.inputs
    if x.dtype != call.output.dtype:
        return []
    make = lambda: _layers.Activation("linear", name=layer.name)  # noqa: E731
    return [Call(made.layer(layer, "same", make), (x,), {}, call.output, call.name)]


def _split_squared_difference(call: Call, made: Made) -> list[Call]:
    """The square of a difference -> Subtract, Multiply."""
    layer = call.layer
    if len(call.inputs) != 2:
        return []
    subtract = made.layer(
        layer, "subtract", lambda: _layers.Subtract(name=f"{layer.name}_subtract")
    )
    multiply = made.layer(layer, "multiply", lambda: _layers.Multiply(name=layer.name))
    difference = between(call, subtract, call.output.shape)
    return [
        Call(subtract, (call.inputs,), {}, difference, path(call, subtract)),
        Call(multiply, ([difference, difference],), {}, call.output, call.name),
    ]


def _split_abs(call: Call, made: Made) -> list[Call]:
    """|x| -> LeakyReLU with the slope -1, of which runtimes have a kernel everywhere."""
    layer = call.layer
    leaky = made.layer(layer, "leaky", lambda: _layers.LeakyReLU(-1.0, name=layer.name))
    return [Call(leaky, (call.inputs[0],), {}, call.output, call.name)]


def _split_sum(call: Call, made: Made) -> list[Call]:
    """A sum along axes of known sizes -> mean, Rescaling by their number."""
    layer = call.layer
    x, axis, keepdims = operands(call, "input_tensor", "axis", "keepdims")
    sizes = [x.shape[each] for each in tf.nest.flatten(axis) if isinstance(each, int)]
    if not sizes or None in sizes or x.shape[0] is not None:
        return []
    mean = _operation(call, made, "mean", tf.math.reduce_mean)
    scale = made.layer(
        layer, "scale", lambda: _layers.Rescaling(float(math.prod(sizes)), name=layer.name)
    )
    middle = between(call, mean, call.output.shape)
    options = {"axis": axis, "keepdims": bool(keepdims)}
    return [
        Call(mean, (x,), options, middle, path(call, mean)),
        Call(scale, (middle,), {}, call.output, call.name),
    ]


def _split_clip(call: Call, made: Made) -> list[Call]:
    """tf.clip_by_value with numbers -> ReLU, or the smaller and the larger one."""
    layer = call.layer
    x, *limits = operands(call, "t", "clip_value_min", "clip_value_max")
    low, high = map(number, limits)
    if low is None or high is None:
        return []
    if low == 0 < high:
        relu = made.layer(layer, "relu", lambda: _layers.ReLU(high, name=layer.name))
        return [Call(relu, (x,), {}, call.output, call.name)]
    minimum = _operation(call, made, "minimum", tf.math.minimum)
    maximum = _operation(call, made, "maximum", tf.math.maximum)
    middle = between(call, minimum, call.output.shape)
    return [
        Call(minimum, (x, high), {}, middle, path(call, minimum)),
        Call(maximum, (middle, low), {}, call.output, path(call, maximum)),
    ]


def _operation(call: Call, made: Made, part: str, function: Callable[..., Any]) -> Any:
    """The layer of another operation."""
    layer = call.layer
    return made.layer(layer, part, lambda: type(layer)(function, name=f"{layer.name}_{part}"))


def _split_roll(call: Call, made: Made) -> list[Call]:
    """tf.roll -> Roll, as TFLite has no operation for it, but for what it is made of."""
    layer = call.layer
    x, shift, axis = operands(call, "input", "shift", "axis")
    shifts, axes = tf.nest.flatten(shift), tf.nest.flatten(axis)
    if not all(isinstance(each, int) for each in [*shifts, *axes]):
        return []
    roll = made.layer(layer, "roll", lambda: Roll(shifts, axes, name=layer.name))
    return [Call(roll, (x,), {}, call.output, call.name)]


def _split_reshape(call: Call, made: Made) -> list[Call]:
    """tf.reshape to sizes that tensors were asked for -> to numbers, as far as they are known."""
    x, shape = operands(call, "tensor", "shape")
    if not isinstance(shape, (list, tuple)) or not any(isinstance(each, Value) for each in shape):
        return []
    batch, *sizes = [_size_of(each) if isinstance(each, Value) else each for each in shape]
    rest = math.prod(each for each in sizes if isinstance(each, int))
    if batch != BATCH or None in x.shape[1:] or not all(isinstance(each, int) for each in sizes):
        return []
    sizes = [math.prod(x.shape[1:]) // -rest if each == -1 else each for each in sizes]
    call.output.shape = (x.shape[0], *sizes)
    return [Call(call.layer, (x, [-1, *sizes]), {}, call.output, call.name)]


BATCH = "batch"
"""In the place of a size: that of the first axis, which is not known."""


def _size_of(value: Value) -> Any:
    """The size that an integer of a graph stands for, e.g. `tf.shape(x)[1]`; None if unknown."""
    call = value.producer
    if call is None or not is_operation(call.layer) or not call.inputs:
        return None
    asked = call.inputs[0].producer
    if asked is None or str(getattr(asked.layer, "symbol", "")) not in SHAPES:
        return None
    if call.layer.symbol == "unstack":
        axis = values_in(call.outputs).index(value)
    else:
        (axis,) = [each for each in tf.nest.flatten(call.args[1:]) if isinstance(each, int)] or [-1]
    shape = asked.inputs[0].shape
    if not 0 <= axis < len(shape):
        return None
    return BATCH if axis == 0 and shape[0] is None else shape[axis]


SHAPES = ("compat.v1.shape", "shape")
"""Operations that give a tensor's sizes."""


def _split_resize(call: Call, made: Made) -> list[Call]:
    """tf.image.resize to a known size -> Resizing, where it can do the same."""
    layer = call.layer
    _, _, method, keeps_ratio, antialias = operands(
        call, "images", "size", "method", "preserve_aspect_ratio", "antialias"
    )
    method = {None: "bilinear"}.get(method, method)
    sizes = call.output.shape[1:3]
    if keeps_ratio or antialias or method not in ("bilinear", "nearest"):
        return []
    if len(call.output.shape) != 4 or None in sizes:
        return []
    resizing = made.layer(
        layer, "resize", lambda: _layers.Resizing(*sizes, interpolation=method, name=layer.name)
    )
    return [Call(resizing, (call.inputs[0],), {}, call.output, call.name)]


OPERATIONS: dict[str, Lowering] = {
    "nn.silu": _split_silu,
    "math.negative": _split_negative,
    "math.divide": _split_division,
    "math.truediv": _split_division,
    "__operators__.truediv": _split_division,
    "math.add_n": _split_add_n,
    "cast": _split_cast,
    "math.square": _split_square,
    "math.pow": _split_power,
    "math.squared_difference": _split_squared_difference,
    "math.abs": _split_abs,
    "math.reduce_sum": _split_sum,
    "clip_by_value": _split_clip,
    "roll": _split_roll,
    "reshape": _split_reshape,
    "image.resize": _split_resize,
    "einsum": split_einsum,
    **dict.fromkeys(("concat", "stack", "math.maximum", "math.minimum"), convert_fixed_ranges),
}
"""TensorFlow's name of an operation on symbolic tensors -> what splits it."""
